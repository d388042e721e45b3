"""What a process needs before it imports torch, run at the start of Python by ``polyxla_torchtpu.pth``.

torch loads TorchTPU and this package in any order, and TorchTPU opens the library of `TPU_LIBRARY_PATH`
when it is imported. So that variable is set where a TPU is to be played, before anything is imported.
"""

from __future__ import annotations

import importlib.util

from polyxla.env import POLYXLA_RUNTIME, snapshot, update_environ
from polyxla_tpu.env import POLYXLA_EMULATE, TPU_LIBRARY_PATH


def show_library() -> None:
    """Set the path of the played libtpu, if the environment asks for one and for no other runtime."""
    environ = snapshot()
    is_asked_for = environ.get(POLYXLA_EMULATE) and environ.get(POLYXLA_RUNTIME) in (None, "", "torchtpu")
    if is_asked_for and importlib.util.find_spec("polyxla_bridge"):
        import polyxla_bridge

        update_environ({TPU_LIBRARY_PATH: str(polyxla_bridge.LIBRARY)})
