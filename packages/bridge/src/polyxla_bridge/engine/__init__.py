"""Engines: they execute programs behind PJRT's function table."""

from __future__ import annotations


def import_jax() -> None:
    """Import jax, which draws from NumPy's global generator, and leave that as the program has set it."""
    import numpy as np

    state = np.random.get_state()  # noqa: NPY002
    import jax  # noqa: F401

    np.random.set_state(state)  # noqa: NPY002
