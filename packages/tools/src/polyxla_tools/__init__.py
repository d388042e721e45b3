"""The commands ``polyxla doctor``, ``polyxla fits`` and ``polyxla warm``."""
