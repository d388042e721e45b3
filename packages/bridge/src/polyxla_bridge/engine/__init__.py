"""Engines: what executes programs behind the table."""
