"""Which libtpu TorchTPU opens, decided when torch or torch_tpu is about to be imported.

torch loads TorchTPU and this package in any order, and TorchTPU opens the library of `TPU_LIBRARY_PATH` when
it is imported: `polyxla_torchtpu.framework` may come too late. ``polyxla_torchtpu.pth`` imports this module
whenever Python starts, in programs without torch too, so it imports nothing but sys by itself.
"""

import sys


class BeforeTorch:
    """A finder of modules that finds none."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Look at the name of a module that is about to be imported."""
        if name in ("torch", "torch_tpu"):
            show_library()


def show_library() -> None:
    """Set the path of the emulated libtpu if a TPU is to be emulated, and where no chip is attached.

    Without a chip, the real libtpu looks for one for many minutes, already at the first backward pass on the
    CPU, because torch then counts TorchTPU's devices. The emulated one answers at once.
    """
    import importlib.util

    from polyxla.plugin import (
        POLYXLA_EMULATE,
        POLYXLA_RUNTIME,
        TPU_LIBRARY_PATH,
        attached_chips,
        snapshot,
        update_environ,
    )

    environ = snapshot()
    if environ.get(POLYXLA_EMULATE):
        is_emulated = environ.get(POLYXLA_RUNTIME) in (None, "", "torchtpu")
    else:
        is_emulated = not environ.get(TPU_LIBRARY_PATH) and not attached_chips()
    if is_emulated and importlib.util.find_spec("polyxla_bridge"):
        import polyxla_bridge

        update_environ({TPU_LIBRARY_PATH: str(polyxla_bridge.LIBRARY)})


sys.meta_path.insert(0, BeforeTorch)
