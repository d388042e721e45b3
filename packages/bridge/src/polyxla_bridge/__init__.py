"""A PJRT plugin written in Python: any `polyxla_bridge.engine.engine.Engine` becomes a torch_xla device.

Importing this package or `polyxla_bridge.torch_xla_plugin` starts nothing and imports neither jax nor numpy.
"""

from pathlib import Path

LIBRARY = Path(__file__).parent / "native" / "library.so"
"""The library with PJRT's function table, which torch_xla opens. Built with the package by hatch_build.py."""
