"""The ``polyxla`` command."""
