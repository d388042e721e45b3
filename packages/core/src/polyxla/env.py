"""Environment variables. No other module of this package touches `os.environ`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyxla.errors import UsageError

POLYXLA_RUNTIME = "POLYXLA_RUNTIME"
"""The runtime's entry-point name.
Default: chosen from the other variables and the attached chips; ``polyxla runtimes`` explains the choice.
"""

POLYXLA_DEVICES = "POLYXLA_DEVICES"
"""The devices to use: ``auto``, a count such as ``8``, or indices such as ``[5]``.
Default: auto.
"""

POLYXLA_PRECISION = "POLYXLA_PRECISION"
"""The precision policy's name, such as ``32-true``.
Default: none; the module keeps its dtypes.
"""

POLYXLA_START_TIMEOUT_S = "POLYXLA_START_TIMEOUT_S"
"""Longest wait for the first answer of a new replica process, in seconds.
Default: 120.
"""

POLYXLA_INPUT_TIMEOUT_S = "POLYXLA_INPUT_TIMEOUT_S"
"""Longest wait for a loader's next batch, in seconds.
Default: 1800.
"""

POLYXLA_STALL_TIMEOUT_S = "POLYXLA_STALL_TIMEOUT_S"
"""Longest wait of a replica for others, in seconds; ``inf`` waits without limit.
Default: 300.
"""

POLYXLA_WAIT_S = "POLYXLA_WAIT_S"
"""Longest wait for devices that another job is using, in seconds; ``polyxla run --wait`` sets it.
Default: 0; busy devices are an error that names the job.
"""

POLYXLA_SECRET = "POLYXLA_SECRET"  # noqa: S105  (a variable's name, not a secret)
"""What only the processes of one job know, and by which they know each other. Also set for replicas.
Default: a launch makes one. Launches on several hosts need the same: a random text, set on each.
"""

POLYXLA_COMPILE_CACHE = "POLYXLA_COMPILE_CACHE"
"""Directory of the persistent compilation cache, or ``off``; runtimes without such a cache ignore it.
Default: ``on``, which is ``polyxla/programs`` in the user's cache directory.
"""

POLYXLA_FULL_TRACEBACK = "POLYXLA_FULL_TRACEBACK"
"""``1``: tracebacks include the frames of polyxla, its plugins and torch_xla's launch.
Default: 0; the user's frames, and those of libraries that the user called.
"""

POLYXLA_RUN = "POLYXLA_RUN"
"""Given to the program of ``polyxla run``: a JSON object with the origin, such as ``--devices 4``, of each
``NAME=value`` that it sets, for errors to name.
"""

DEFAULT_S: Mapping[str, float] = {
    POLYXLA_START_TIMEOUT_S: 120,
    POLYXLA_INPUT_TIMEOUT_S: 1800,
    POLYXLA_STALL_TIMEOUT_S: 300,
}
"""Default of each timeout variable, in seconds."""


@dataclass(frozen=True)
class Setting:
    """A value and its origin, so that an error can name where it was set.

    Attributes:
        value: the value; None if nothing was set and there is no default.
        origin: such as ``--devices 9``, ``POLYXLA_DEVICES=9`` or ``default``.
    """

    value: Any
    origin: str


@dataclass(frozen=True)
class LaunchSettings:
    """The user's choices for one launch, each with its origin."""

    runtime: Setting
    devices: Setting
    precision: Setting
    wait_s: Setting


def from_environ(
    environ: Mapping[str, str],
    *,
    runtime: Setting | None = None,
    devices: Setting | None = None,
    precision: Setting | None = None,
    wait_s: Setting | None = None,
) -> LaunchSettings:
    """Return the settings of a launch: arguments win over the environment, the environment over defaults."""
    return LaunchSettings(
        runtime=runtime or setting(environ, POLYXLA_RUNTIME, None),
        devices=devices or setting(environ, POLYXLA_DEVICES, "auto"),
        precision=precision or setting(environ, POLYXLA_PRECISION, None),
        wait_s=wait_s or setting(environ, POLYXLA_WAIT_S, "0"),
    )


def setting(environ: Mapping[str, str], name: str, default: str | None) -> Setting:
    """Return a variable's value, or the default if it is unset or empty.

    Raises:
        UsageError: `POLYXLA_RUN` is not what ``polyxla run`` sets.
    """
    # An empty variable counts as unset: `NAME= command` is how shells unset one for a command.
    if text := environ.get(name):
        assigned = f"{name}={text}"
        return Setting(text, _origins(environ.get(POLYXLA_RUN) or "{}").get(assigned, assigned))
    return Setting(default, "default")


# The variable stays the same while a program runs, and each setting asks for it.
@functools.lru_cache(maxsize=1)
def _origins(text: str) -> Mapping[str, str]:
    """Read the origins in a value of `POLYXLA_RUN`."""
    try:
        origins = json.loads(text)
    except ValueError:
        origins = None
    if not isinstance(origins, dict) or not all(isinstance(origin, str) for origin in origins.values()):
        raise UsageError(
            f"{POLYXLA_RUN} is not a JSON object of texts",
            where=f"{POLYXLA_RUN}={text}",
            fix="Unset it: `polyxla run` sets it for its program.",
        )
    return origins


def timeout_s(environ: Mapping[str, str], name: str) -> float:
    """Return the value of one of the timeout variables of `DEFAULT_S`, in seconds.

    Raises:
        UsageError: the value is not a positive number.
    """
    text = environ.get(name) or f"{DEFAULT_S[name]:g}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    # Only waiting for other replicas may be unlimited: a start or a batch that never comes would hang the
    # job.
    if not 0 < seconds < float("inf") and (name, seconds) != (POLYXLA_STALL_TIMEOUT_S, float("inf")):
        raise UsageError(
            f"{name}={text} is not a positive number of seconds",
            where="the environment",
            fix=f"Write {name}={DEFAULT_S[name]:g}.",
        )
    return seconds


def working_directory() -> Path:
    """Return the working directory.

    Raises:
        UsageError: it has been deleted.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "the working directory has been deleted",
            fix="Change to a directory that exists, and start again.",
        ) from None


def snapshot() -> dict[str, str]:
    """Copy this process's environment, which other threads may change."""
    # Not dict(os.environ): it raises KeyError for a variable that a thread removes after it was listed, as
    # torch_xla's threads do while they start a client.
    names = list(os.environ)
    return {name: value for name in names if (value := os.environ.get(name)) is not None}


def update_environ(variables: Mapping[str, str]) -> None:
    """Set variables in this process's environment, permanently."""
    os.environ.update(variables)


def replace_environ(environ: Mapping[str, str]) -> None:
    """Replace this process's whole environment by `environ`, permanently."""
    # In place: os.environ writes through to the environment that C libraries read.
    os.environ.clear()
    os.environ.update(environ)


@contextlib.contextmanager
def temporary_environ(environ: Mapping[str, str]) -> Iterator[None]:
    """Change this process's environment to `environ`, then restore it on exit.

    A replica that runs inside the caller's process needs its variables where torch_xla reads them. Only the
    variables that differ are restored: libraries still need the variables that they set on import. The
    environment belongs to the whole process, so other threads see the change.
    """
    before = snapshot()
    # torch_xla and libtpu set variables when they are imported, and need them afterwards: those are not ours
    # to restore.
    touched = {name for name in before.keys() | environ.keys() if before.get(name) != environ.get(name)}
    _set(touched, environ)
    try:
        yield
    finally:
        _set(touched, before)


def _set(names: Iterable[str], values: Mapping[str, str]) -> None:
    for name in names:
        if name in values:
            os.environ[name] = values[name]
        else:
            os.environ.pop(name, None)
