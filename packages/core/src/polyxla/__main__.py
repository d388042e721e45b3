"""``python -m polyxla``."""

from polyxla.cli import main

main()
