"""A process's side of the mesh service."""
