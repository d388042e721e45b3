"""The torch_xla plugin, which fills the library's function table.

torch_xla imports this module whenever it is imported itself. So nothing starts before torch_xla asks for the
library, and until then the process may be forked.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch_xla
from torch_xla.experimental.plugins import DevicePlugin

from polyxla_bridge import LIBRARY, env
from polyxla_bridge.engine import import_jax

if TYPE_CHECKING:
    from polyxla_bridge.engine.engine import Engine


class EnginePlugin(DevicePlugin):
    """A torch_xla plugin for the engine that `make_engine` returns."""

    def make_engine(self) -> Engine:
        """Start the engine; called once, when torch_xla creates its client."""
        raise NotImplementedError

    def library_path(self) -> str:
        """Fill the function table and return the path of the library.

        Raises:
            RuntimeError: the program is partitioned, and the process runs no such programs.
        """
        if refusal := self.refusal_of_spmd():
            _refuse_spmd(refusal)
        # Imported here, because these modules are many, and a program may end without using a device.
        from polyxla_bridge.activation import activate
        from polyxla_bridge.torch_xla_opener import TorchXla

        # torch_xla opens the library next, which would become an emulated libtpu if its table were empty.
        activate(self.make_engine, TorchXla)
        return str(LIBRARY)

    def refusal_of_spmd(self) -> str:
        """Return why this process runs no partitioned programs (SPMD), in a sentence; empty if it does."""
        return ""

    def configure_single_process(self) -> None:
        """Change nothing: the launcher has set the environment."""


CACHE_COUNTERS = ("polyxla.ProgramCacheHit", "polyxla.ProgramCacheMiss")
"""torch_xla counters of the compilation cache's hits and misses. They do not exist if there is no cache."""


def count_lookup(is_hit: bool) -> None:
    """Count a hit or a miss of the compilation cache."""
    native_part: Any = torch_xla._XLAC  # type: ignore[attr-defined]
    native_part._xla_increment_counter(CACHE_COUNTERS[0 if is_hit else 1], 1)


class CpuPlugin(EnginePlugin):
    """Replicas on this machine's CPU, through jaxlib, or on the devices of a PJRT plugin."""

    def make_engine(self) -> Engine:
        """Start the clients for this process's replicas."""
        settings = env.current()
        if settings.plugin:
            from polyxla_bridge.pjrt_plugin import make_engine

            return make_engine(settings, count_lookup)
        import_jax()
        from polyxla_bridge.engine.jax_engine import JaxEngine

        return JaxEngine(settings, count_lookup)

    def physical_chip_count(self) -> int:
        """Return the number of processes that torch_xla starts."""
        return env.current().processes


class CudaPlugin(CpuPlugin):
    """NVIDIA GPUs of this machine, through XLA's plugin for them or one that the environment names."""

    def make_engine(self) -> Engine:
        """Open the GPUs."""
        from polyxla_bridge import pjrt_plugin

        settings = env.current()
        chosen = dataclasses.replace(settings, plugin=settings.plugin or pjrt_plugin.CUDA)
        return pjrt_plugin.make_engine(chosen, count_lookup)


def _refuse_spmd(why: str) -> None:
    """Refuse partitioned programs, now and later: torch_xla would abort the process at the first one."""
    from torch_xla import runtime

    def use_spmd(auto: bool | None = False) -> None:
        raise RuntimeError(f"SPMD programs (torch_xla.runtime.use_spmd) do not run here: {why}")

    runtime.use_spmd = use_spmd
    # The program may have called the original function before it asked for a device, or set the variable.
    if runtime.is_spmd():
        use_spmd()
