"""Engines: they execute programs behind PJRT's function table."""
