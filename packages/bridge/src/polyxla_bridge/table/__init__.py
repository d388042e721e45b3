"""PJRT's function table as C sees it, filled from Python."""
