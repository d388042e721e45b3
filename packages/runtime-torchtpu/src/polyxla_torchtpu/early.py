"""Which libtpu TorchTPU opens, decided before torch is imported.

torch loads TorchTPU and this package in any order, and TorchTPU opens the library of `TPU_LIBRARY_PATH`
when it is imported.
"""

from __future__ import annotations

import importlib.util

from polyxla.plugin import (
    POLYXLA_EMULATE,
    POLYXLA_RUNTIME,
    TPU_LIBRARY_PATH,
    attached_chips,
    snapshot,
    update_environ,
)


def show_library() -> None:
    """Set the path of the emulated libtpu if a TPU is to be emulated, and where no chip is attached.

    Without a chip, the real libtpu looks for one for many minutes, already at the first backward pass on the
    CPU, because torch then counts TorchTPU's devices. The emulated one answers at once.
    """
    environ = snapshot()
    if environ.get(POLYXLA_EMULATE):
        is_emulated = environ.get(POLYXLA_RUNTIME) in (None, "", "torchtpu")
    else:
        is_emulated = not environ.get(TPU_LIBRARY_PATH) and not attached_chips()
    if is_emulated and importlib.util.find_spec("polyxla_bridge"):
        import polyxla_bridge

        update_environ({TPU_LIBRARY_PATH: str(polyxla_bridge.LIBRARY)})
