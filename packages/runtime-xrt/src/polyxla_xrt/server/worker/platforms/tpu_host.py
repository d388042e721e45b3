"""The TPU chips of this host: whether a worker can open them, and what libtpu needs for that."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyxla import UsageError
from polyxla.plugin import (
    ONE,
    POLYXLA_SECRET,
    Bounds,
    EmulatedTpu,
    TpuSlice,
    find_holders,
    host_chips,
    host_environment,
    join,
    skip_metadata,
    this_slice,
    with_secret,
)
from polyxla.plugin import tpu_env as env
from polyxla_bridge.plugin_client.plugin import Option
from polyxla_xrt.config.workers import Worker
from polyxla_xrt.server.worker.platforms.library import TPU, Library, SliceMembers

LIBTPU_INIT_ARGS = "LIBTPU_INIT_ARGS"
"""libtpu's flags, separated by spaces."""
BARRIER = "xla_tpu_use_enhanced_launch_barrier"
"""The flag that must be off: with it, a program may wait forever for the chips of other processes.

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


def find_library(
    options: Mapping[str, Option], environ: Mapping[str, str], workers: Sequence[Worker] = ()
) -> Library:
    """Return libtpu, and the variables by which it opens all chips of this host.

    Args:
        options: libtpu's own options for its client.
        environ: this process's environment.
        workers: the workers of all hosts of the slice, to open it together; empty to open only this host's
            chips.

    Raises:
        UsageError: there is no chip, another process has the chips, libtpu is missing, or it is not known
            which chips these are; or the workers are not those of the slice's hosts.
    """
    emulated = EmulatedTpu.read(environ)
    if not host_chips(environ):
        raise UsageError(
            "no TPU chip is attached to this machine",
            where=SOURCE,
            fix="Start the worker on a TPU VM, pass --platform cpu, or emulate a TPU: set "
            f"{env.POLYXLA_EMULATE}=v4-8.",
        )
    # Variables that select a part of the host are ignored: a worker serves the whole host.
    tpu_slice = this_slice({name: value for name, value in environ.items() if name not in _FOR_PARTS})
    if tpu_slice.megascale:
        raise UsageError(
            "workers of TPU nodes do not work on several slices",
            where=f"{env.MEGASCALE_NUM_SLICES}={tpu_slice.slices}",
            fix=f"Start a worker for each slice, without the {env.MEGASCALE_NUM_SLICES} of the others: "
            f"{env.POLYXLA_EMULATE}={tpu_slice.accelerator.name}, if it is emulated.",
        )
    members = _members(tpu_slice, workers, emulated) if workers else None
    variables = _of_whole_host(tpu_slice, environ, members)
    if emulated:
        emulated.require_library(environ)
        where = f"host {tpu_slice.worker_id} of a slice" if members else "a host"
        emulated.say(f"a worker has the chips of {where}, {join(tpu_slice.host)}")
        variables |= emulated.library_environment(emulated.devices(environ))
        if members:
            # The serving processes of the emulated hosts recognize each other by this secret.
            variables[POLYXLA_SECRET] = with_secret(environ, len(members.workers))[POLYXLA_SECRET]
        return Library(Path(variables[env.TPU_LIBRARY_PATH]), SOURCE, options, variables, TPU, members)
    # An emulated TPU has no chips that a process could hold, so only real chips are checked.
    _check_free()
    return Library(_libtpu(environ), SOURCE, options, variables, TPU, members)


def _members(tpu_slice: TpuSlice, workers: Sequence[Worker], emulated: EmulatedTpu | None) -> SliceMembers:
    hosts = tpu_slice.bounds.host_count
    if hosts == 1 or len(workers) != hosts:
        raise UsageError(
            f"the slice {tpu_slice.accelerator.name} has {hosts} host(s), the list {len(workers)} worker(s)",
            where="--slice",
            fix="List the worker of each host, in the order of TPU_WORKER_ID." if hosts > 1 else "Omit it.",
        )
    if emulated and emulated.host is None:
        raise UsageError(
            "it is not known which host of the emulated slice this worker is on",
            where=f"{env.POLYXLA_EMULATE}={emulated.accelerator.name}",
            fix=f"Set {env.POLYXLA_EMULATE_HOST} to the host's number, 0 to {hosts - 1}.",
        )
    return SliceMembers(tuple(workers), tpu_slice.worker_id)


def _of_whole_host(
    tpu_slice: TpuSlice, environ: Mapping[str, str], members: SliceMembers | None
) -> dict[str, str]:
    """Return the variables of the process that opens all chips of this host.

    Without members, the variables describe the host as a slice of its own.
    """
    bounds, hostnames = Bounds(ONE, tpu_slice.host), ["localhost"]
    if members:
        bounds, hostnames = tpu_slice.bounds, [worker.host for worker in members.workers]
    flags = environ.get(LIBTPU_INIT_ARGS, "")
    # A user who has set the flag, on or off, keeps that choice.
    if BARRIER not in flags:
        flags = f"{flags} --{BARRIER}=false".strip()
    return {
        **host_environment(bounds, members.own if members else 0, hostnames),
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
