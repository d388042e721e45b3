"""The client side of workers (`channel`, `lease`, `engine`) and of the mesh service (`mesh`)."""
