"""What is done when torch, torch_tpu, and modules that know no TorchTPU are about to be imported.

Which libtpu TorchTPU opens is decided, and Accelerate and FSDP2 learn of TorchTPU's device.

torch loads TorchTPU and this package in any order, and TorchTPU opens the library of `TPU_LIBRARY_PATH` when
it is imported: `polyxla_torchtpu.framework` may come too late. ``polyxla_torchtpu.pth`` imports this module
whenever Python starts, in programs without torch too, so it imports nothing but sys by itself.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec


ACCELERATE, FSDP = "polyxla_torchtpu.accelerate", "polyxla_torchtpu.fsdp"
TAUGHT = {
    "accelerate": ACCELERATE,
    "accelerate.commands.launch": ACCELERATE,
    "torch.distributed.fsdp._fully_shard._fsdp_init": FSDP,
    "transformers.trainer": ACCELERATE,
}
"""Modules that are changed after their import, and the modules whose `teach` changes them."""


class BeforeTorch:
    """A finder of modules that looks at their names."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, *_: object) -> ModuleSpec | None:
        """Look at the name of a module that is about to be imported; find only one that is to be changed."""
        if name in ("torch", "torch_tpu"):
            show_library()
        elif name in TAUGHT:
            return changed(name, path)
        return None


def changed(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module that is changed after it was imported."""
    from importlib import import_module
    from importlib.machinery import PathFinder, SourceFileLoader
    from types import ModuleType

    class Loader(SourceFileLoader):
        def exec_module(self, module: ModuleType) -> None:
            super().exec_module(module)
            import_module(TAUGHT[name]).teach(module)

    spec = PathFinder.find_spec(name, path)
    if spec is not None and isinstance(spec.loader, SourceFileLoader):
        spec.loader = Loader(name, spec.loader.path)
    return spec


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
