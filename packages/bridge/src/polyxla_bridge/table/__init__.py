"""PJRT's function table, filled from Python."""
