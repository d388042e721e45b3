"""The TPU chips of this host: whether a worker can open them, and what libtpu needs for that."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from polyxla import UsageError
from polyxla_bridge.plugin_client.memory import Option
from polyxla_tpu import env
from polyxla_tpu.accelerators import Bounds
from polyxla_tpu.boxes import ONE
from polyxla_tpu.played import PlayedTpu
from polyxla_tpu.processes.holders import find_holders
from polyxla_tpu.slices import TpuSlice
from polyxla_tpu.this_host import host_chips, skip_metadata, this_slice
from polyxla_tpu.topology import host_environment, join
from polyxla_xrt.server.worker.platforms.library import TPU, Library

LIBTPU_INIT_ARGS = "LIBTPU_INIT_ARGS"
"""libtpu's flags, separated by spaces."""
BARRIER = "xla_tpu_use_enhanced_launch_barrier"
"""The flag that must be off: with it, a program may wait forever for the chips of others.

Source: ``_setup_libtpu_flags`` of torch_xla 2.9.0, which names pytorch/xla issue 9084.
"""
SOURCE = f"--platform {TPU}"
_FOR_PARTS = (
    env.TPU_PROCESS_BOUNDS,
    env.TPU_CHIPS_PER_PROCESS_BOUNDS,
    env.TPU_HOST_BOUNDS,
    env.TPU_CHIPS_PER_HOST_BOUNDS,
    env.TPU_VISIBLE_CHIPS,
)


def find_library(options: Mapping[str, Option], environ: Mapping[str, str]) -> Library:
    """Return libtpu, and the variables by which it opens all chips of this host and no other's.

    Args:
        options: libtpu's own options for its client.
        environ: this process's environment.

    Raises:
        UsageError: there is no chip, another process has the chips, libtpu is missing, or it is not known
            which chips these are.
    """
    played = PlayedTpu.read(environ)
    if not host_chips(environ):
        raise UsageError(
            "no TPU chip is attached to this machine",
            where=SOURCE,
            fix="Start the worker on a TPU VM, pass --platform cpu, or play a TPU: set "
            f"{env.POLYXLA_EMULATE}=v4-8.",
        )
    # What describes a part of the host does not matter: a worker serves the whole.
    tpu_slice = this_slice({name: value for name, value in environ.items() if name not in _FOR_PARTS})
    variables = _of_whole_host(tpu_slice, environ)
    if played:
        played.require_library(environ)
        played.say(f"a worker has the chips of a host, {join(tpu_slice.host)}")
        variables |= played.library_environment(played.devices(environ))
        return Library(Path(variables[env.TPU_LIBRARY_PATH]), SOURCE, options, variables, TPU)
    _check_free()
    return Library(_libtpu(environ), SOURCE, options, variables, TPU)


def _of_whole_host(tpu_slice: TpuSlice, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the process that opens all chips of this host, as if it were a slice alone."""
    bounds = Bounds(ONE, tpu_slice.host)
    flags = environ.get(LIBTPU_INIT_ARGS, "")
    if BARRIER not in flags:
        flags = f"{flags} --{BARRIER}=false".strip()
    return {
        **host_environment(bounds, 0, ("localhost",)),
        env.TPU_VISIBLE_CHIPS: join(range(bounds.chips_per_host_count)),
        LIBTPU_INIT_ARGS: flags,
        **skip_metadata(tpu_slice),
    }


def _check_free() -> None:
    if holders := find_holders():
        raise UsageError(
            f"the TPU chips of this host are in use: {'; '.join(map(str, holders))}",
            where=SOURCE,
            fix="End that process, or use its worker if it is one.",
        )


def _libtpu(environ: Mapping[str, str]) -> Path:
    """Return libtpu's path. Source: torch_xla 2.9.0, which looks in the same two places."""
    if path := environ.get(env.TPU_LIBRARY_PATH):
        if not Path(path).is_file():
            raise UsageError(
                f"there is no file {path}",
                where=f"{env.TPU_LIBRARY_PATH}={path}",
                fix=f"Write libtpu.so's path, or unset {env.TPU_LIBRARY_PATH} to use the package libtpu.",
            )
        return Path(path)
    found = importlib.util.find_spec("libtpu")
    if found is None or found.origin is None:
        raise UsageError(
            "TPU chips are attached, but libtpu is not installed",
            where=SOURCE,
            fix=f"Install it (pip install libtpu), or set {env.TPU_LIBRARY_PATH} to its file.",
        )
    return Path(found.origin).with_name("libtpu.so")
