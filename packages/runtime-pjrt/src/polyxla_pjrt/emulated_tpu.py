"""The emulated TPU, a plugin of torch_xla's. Imported by processes that import torch_xla."""

from __future__ import annotations

from torch_xla.experimental import plugins

from polyxla.env import snapshot
from polyxla_pjrt import env
from polyxla_pjrt.discovery import prepared_plan
from polyxla_pjrt.layout import say_emulated


class EmulatedTpu(plugins.DevicePlugin):
    """An emulated TPU in torch_xla's registry of plugins."""

    def library_path(self) -> str:
        """Fill the bridge's table and return where its library is."""
        from polyxla_bridge.torch_xla_plugin import CpuPlugin

        environ = snapshot()
        # For replicas, the launcher has printed it once for all.
        if env.PJRT_LOCAL_PROCESS_COUNT not in environ and (plan := prepared_plan(environ)):
            say_emulated(plan)
        return CpuPlugin().library_path()

    def host_index(self) -> int:
        """Return the number of the emulated host."""
        return int(snapshot()[env.TPU_WORKER_ID])

    def physical_chip_count(self) -> int:
        """Return the number of processes of this host."""
        plan = prepared_plan(snapshot())
        return plan.layout.processes if plan else 1

    def configure_single_process(self) -> None:
        """Do nothing: the environment is complete."""


def register_emulated() -> None:
    """Make torch_xla's Python find the emulated TPU, which it looks up by the name of a real one."""
    plugins._plugin_registry["TPU"] = EmulatedTpu()
