"""``python -m polyxla``."""

from polyxla.cli.app import main

main()
