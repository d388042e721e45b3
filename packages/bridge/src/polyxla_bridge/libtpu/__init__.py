"""An emulated libtpu, which stands behind ``TPU_LIBRARY_PATH`` on a machine without TPUs.

It does what libtpu does before it computes: it reads the variables that describe the slice, takes the chips
and the port for its process, numbers the devices by their coordinates, and refuses what libtpu refuses. Then
it computes on the CPU. `POLYXLA_LIBTPU_HOST` describes the chips of the host. Everything else comes from the
variables that libtpu itself reads, so the code between a program and libtpu is what runs on a TPU.

Importing this package starts nothing and imports neither jax nor numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from polyxla_bridge import LIBRARY, env

library: Path = LIBRARY
"""The library to name in ``TPU_LIBRARY_PATH``. It and `check` are the entry point that polyxla asks."""


def check(environ: Mapping[str, str]) -> None:
    """Check the variables of emulated devices.

    Raises:
        ValueError: one is invalid; the text says what to write after a semicolon.
    """
    env.device_memory(environ)
    env.has_tpu_numerics(environ)
    env.detects_races(environ)


def open_library() -> None:
    """Fill the library's function table. The library calls this when a framework opens it."""
    from polyxla_bridge.activation import activate
    from polyxla_bridge.libtpu import pallas
    from polyxla_bridge.libtpu.client import make_engine

    pallas.watch()

    # Check sys.modules, because an import would load a framework that the program does not use. Any other
    # framework, such as JAX, needs nothing from its opener.
    if "torch_xla" in sys.modules:
        from polyxla_bridge.torch_xla_opener import TorchXla
        from polyxla_bridge.torch_xla_plugin import count_lookup

        activate(lambda: make_engine(count_lookup), TorchXla)
    elif "torch_tpu" in sys.modules:
        from polyxla_bridge.torch_tpu_opener import TorchTpu, count_lookup

        activate(lambda: make_engine(count_lookup), TorchTpu)
    else:
        activate(lambda: make_engine(None))
