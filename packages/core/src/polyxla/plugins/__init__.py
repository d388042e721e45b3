"""Finding plugins and choosing among them."""
