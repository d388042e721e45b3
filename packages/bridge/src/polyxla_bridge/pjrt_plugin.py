"""The engine that `POLYXLA_PJRT_PLUGIN` asks for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyxla_bridge.abi import Code
from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.env import (
    POLYXLA_BRIDGE_REPLICAS,
    POLYXLA_PJRT_OPTIONS,
    POLYXLA_PJRT_PLUGIN,
    BridgeSettings,
)
from polyxla_bridge.errors import PjrtError

LIBTPU, CUDA = "libtpu", "cuda"
"""The values of `POLYXLA_PJRT_PLUGIN` that stand for the plugin of an installed package."""
CUDA_PLUGINS = ("xla_cuda13", "xla_cuda12")
"""The modules of ``jax_plugins`` with XLA's plugin for NVIDIA GPUs. The first that is installed is used.

Source: the wheels of jax-cuda13-pjrt 0.11.2 and jax-cuda12-pjrt 0.10.2.
"""
CUDA_PACKAGE = "jax-cuda13-plugin[with-cuda]"
"""What pip installs for it, with NVIDIA's libraries."""


def make_engine(settings: BridgeSettings, on_lookup: Callable[[bool], None] | None) -> PjrtEngine:
    """Start the engine on the plugin that the settings name.

    Args:
        settings: of the job; with several replicas or emulated chips, the plugin must have as many devices.
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
    engine = PjrtEngine(settings, library, client_options(settings), on_lookup)
    wanted, found = settings.replicas, len(engine.devices)
    # A job of one replica may use all devices of the plugin. Several replicas need a device each, and so do
    # emulated chips.
    if wanted != found and (wanted > 1 or settings.places):
        # The caller gets an error, and no engine that it could close.
        engine.close()
        what = "devices of the emulated TPU" if settings.places else f"replicas ({POLYXLA_BRIDGE_REPLICAS})"
        raise PjrtError(
            Code.INVALID_ARGUMENT,
            f"the job has {wanted} {what}, and the plugin {library} {found} devices: choose as many, or the "
            f'devices by {POLYXLA_PJRT_OPTIONS}, for XLA\'s CPU plugin {{"cpu_device_count": {wanted}}}, on '
            f'GPUs {{"visible_devices": {list(range(wanted))}}}',
        )
    return engine


def client_options(settings: BridgeSettings) -> dict[str, Any]:
    """Return the client's options: with CUDA, an emulated chip is a GPU, unless the user chooses others."""
    chips = {"visible_devices": list(range(settings.replicas))}
    return {**(chips if settings.plugin == CUDA and settings.places else {}), **settings.plugin_options}


def library_path(plugin: str) -> Path:
    """Return the library of a plugin.

    Raises:
        PjrtError: there is none.
    """
    if plugin == CUDA:
        if library := cuda_library():
            return library
        raise PjrtError(
            Code.NOT_FOUND,
            f"{POLYXLA_PJRT_PLUGIN}={CUDA}, and XLA's plugin for NVIDIA GPUs is not installed: "
            f"pip install {CUDA_PACKAGE!r}",
        )
    if plugin != LIBTPU:
        if not Path(plugin).is_file():
            raise PjrtError(
                Code.NOT_FOUND,
                f"{POLYXLA_PJRT_PLUGIN}={plugin} is no file; write the path of a PJRT plugin's library, "
                f"{CUDA} or {LIBTPU}",
            )
        return Path(plugin)
    found = importlib.util.find_spec(LIBTPU)
    if found is None or found.origin is None:
        raise PjrtError(
            Code.NOT_FOUND,
            f"{POLYXLA_PJRT_PLUGIN}={LIBTPU}, and there is no package {LIBTPU}: pip install {LIBTPU}",
        )
    return Path(found.origin).with_name("libtpu.so")


def cuda_library() -> Path | None:
    """Return the library of the installed plugin for NVIDIA GPUs; None if there is none."""
    # `jax_plugins` is a namespace package: each of its folders may hold another plugin.
    found = importlib.util.find_spec("jax_plugins")
    folders = found.submodule_search_locations if found else None
    libraries = (Path(at, name, "xla_cuda_plugin.so") for name in CUDA_PLUGINS for at in folders or ())
    return next((library for library in libraries if library.is_file()), None)
