"""The variables polyxla reads, and the only place in this package that touches `os.environ`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polyxla.errors import UsageError

POLYXLA_RUNTIME = "POLYXLA_RUNTIME"
"""The runtime to use, by its entry-point name.
Default: chosen from the other variables and the attached chips; ``polyxla runtimes`` says how.
"""

POLYXLA_DEVICES = "POLYXLA_DEVICES"
"""Which devices to use: ``auto``, a count such as ``8``, or indices such as ``[5]``.
Default: auto.
"""

POLYXLA_PRECISION = "POLYXLA_PRECISION"
"""The precision policy's name, such as ``32-true``.
Default: none; the module keeps the dtypes it was made with.
"""

POLYXLA_START_TIMEOUT_S = "POLYXLA_START_TIMEOUT_S"
"""Longest wait for a new replica process to answer for the first time, in seconds.
Default: 120.
"""

POLYXLA_INPUT_TIMEOUT_S = "POLYXLA_INPUT_TIMEOUT_S"
"""Longest wait of a replica for its loader's next batch, in seconds.
Default: 1800.
"""

POLYXLA_WAIT_S = "POLYXLA_WAIT_S"
"""Longest wait for devices that another job has, in seconds; ``polyxla run --wait`` sets it.
Default: 0, which is an error that says who has them.
"""

POLYXLA_COMPILE_CACHE = "POLYXLA_COMPILE_CACHE"
"""Where a runtime that can keeps compiled programs for the jobs that follow: a folder, or ``off``.
Default: ``on``, which is ``polyxla/programs`` in the person's folder of caches.
"""


DEFAULT_S: Mapping[str, float] = {POLYXLA_START_TIMEOUT_S: 120, POLYXLA_INPUT_TIMEOUT_S: 1800}
"""Deadlines that are set by a variable, in seconds."""


@dataclass(frozen=True)
class Setting:
    """A value and where it came from, so that an error can name the place.

    Attributes:
        value: the value; None where nothing was set and there is no default.
        origin: such as ``--devices``, ``POLYXLA_DEVICES=9`` or ``default``.
    """

    value: Any
    origin: str


@dataclass(frozen=True)
class Settings:
    """What a person asked for, each value with its origin."""

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
) -> Settings:
    """Merge what was passed in code or as flags (it wins) with the environment and the defaults."""
    return Settings(
        runtime=runtime or setting(environ, POLYXLA_RUNTIME, None),
        devices=devices or setting(environ, POLYXLA_DEVICES, "auto"),
        precision=precision or setting(environ, POLYXLA_PRECISION, None),
        wait_s=wait_s or setting(environ, POLYXLA_WAIT_S, "0"),
    )


def setting(environ: Mapping[str, str], name: str, default: str | None) -> Setting:
    """Return what a variable says, or the default where it is unset or empty."""
    if text := environ.get(name):
        return Setting(text, f"{name}={text}")
    return Setting(default, "default")


def timeout_s(environ: Mapping[str, str], name: str) -> float:
    """Read one of the deadlines of `DEFAULT_S`, in seconds.

    Raises:
        UsageError: the variable is not a positive number.
    """
    text = environ.get(name) or f"{DEFAULT_S[name]:g}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(
            f"{name}={text} is not a positive number of seconds",
            where="the environment",
            fix=f"Write {name}={DEFAULT_S[name]:g}.",
        )
    return seconds


def snapshot() -> dict[str, str]:
    """Copy this process's environment."""
    return dict(os.environ)


def add(variables: Mapping[str, str]) -> None:
    """Lay variables over this process's environment, for good."""
    os.environ.update(variables)


def take_over(environ: Mapping[str, str]) -> None:
    """Make `environ` this process's whole environment, for good."""
    os.environ.clear()
    os.environ.update(environ)


@contextlib.contextmanager
def lent(environ: Mapping[str, str]) -> Iterator[None]:
    """Give this process another environment while a replica runs in it, then take it back.

    A replica that runs inside the caller's process needs its variables where torch_xla reads them.
    Only what was lent is undone: what libraries set for themselves on import they go on needing.
    Not for threads: the environment belongs to the whole process.
    """
    before = snapshot()
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
