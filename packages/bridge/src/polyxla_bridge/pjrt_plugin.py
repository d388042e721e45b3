"""The engine that `POLYXLA_PJRT_PLUGIN` asks for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from polyxla_bridge.abi import Code
from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.env import (
    POLYXLA_BRIDGE_REPLICAS,
    POLYXLA_PJRT_OPTIONS,
    POLYXLA_PJRT_PLUGIN,
    BridgeSettings,
)
from polyxla_bridge.errors import PjrtError

LIBTPU = "libtpu"
"""The value of `POLYXLA_PJRT_PLUGIN` that stands for the installed package of this name."""


def make_engine(settings: BridgeSettings, on_lookup: Callable[[bool], None] | None) -> PjrtEngine:
    """Start the engine on the plugin that the settings name.

    Args:
        settings: of the job; with several replicas, the plugin must have as many devices.
        on_lookup: called for each program that this process needs, with whether the compilation cache had it.

    Raises:
        PjrtError: the plugin does not exist, refuses an option, or has another number of devices.
    """
    library = library_path(settings.plugin)
    if settings.processes > 1:
        raise PjrtError(
            Code.INVALID_ARGUMENT,
            f"one process drives the devices of {POLYXLA_PJRT_PLUGIN}={settings.plugin}, and the job has "
            f"{settings.processes} processes: with runtime pjrt, set POLYXLA_PJRT_PROCESSES=1",
        )
    engine = PjrtEngine(settings, library, settings.plugin_options, on_lookup)
    if settings.replicas not in (1, len(engine.devices)):
        engine.close()
        raise PjrtError(
            Code.INVALID_ARGUMENT,
            f"the job has {settings.replicas} replicas ({POLYXLA_BRIDGE_REPLICAS}), and the plugin {library} "
            f"{len(engine.devices)} devices: start as many replicas, or choose the number of devices by "
            f'{POLYXLA_PJRT_OPTIONS}, for XLA\'s CPU plugin {{"cpu_device_count": {settings.replicas}}}',
        )
    return engine


def library_path(plugin: str) -> Path:
    """Return the library of a plugin.

    Raises:
        PjrtError: there is none.
    """
    if plugin != LIBTPU:
        if not Path(plugin).is_file():
            raise PjrtError(
                Code.NOT_FOUND,
                f"{POLYXLA_PJRT_PLUGIN}={plugin} is no file; write the path of a PJRT plugin's library, or "
                f"{POLYXLA_PJRT_PLUGIN}={LIBTPU}",
            )
        return Path(plugin)
    found = importlib.util.find_spec(LIBTPU)
    if found is None or found.origin is None:
        raise PjrtError(
            Code.NOT_FOUND,
            f"{POLYXLA_PJRT_PLUGIN}={LIBTPU}, and there is no package {LIBTPU}: pip install {LIBTPU}",
        )
    return Path(found.origin).with_name("libtpu.so")
