"""The ``polyxla`` command line."""
