"""A variable as it is set, the parsers of numbers and flags, and the waits that a user may set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from polyxla import UsageError
from polyxla.plugin import POLYXLA_WAIT_S
from polyxla_bridge import env as bridge
from polyxla_bridge.env import POLYXLA_STALL_TIMEOUT_S
from polyxla_xrt import env

LONGEST_WAIT_S = 7 * 24 * 3600.0
"""Longest wait that may be requested, in seconds: for other replicas, or for another job's cores."""
MESH_CONNECT_WAIT_S = 300
"""Default of `mesh_connect_wait_s`. Source: torch_xla 1.13, mesh_service.cc."""


class Variable(NamedTuple):
    """A variable that is set, and its text without surrounding whitespace."""

    name: str
    text: str

    @property
    def where(self) -> str:
        """The variable and its value, as an error names them."""
        return f"{self.name}={self.text}"

    def error(self, what: str, fix: str) -> UsageError:
        """Return the error that names this variable as the cause.

        Args:
            what: what is wrong, a sentence without its full stop.
            fix: what to write instead, a sentence with its full stop.
        """
        return UsageError(what, where=self.where, fix=fix)


def find(environ: Mapping[str, str], name: str) -> Variable | None:
    """Return a variable, or None if it is unset or empty."""
    text = environ.get(name, "").strip()
    return Variable(name, text) if text else None


def parse_integer(text: str) -> int | None:
    """Parse a non-negative integer of at most nine digits; return None for any other text."""
    # `int` itself accepts signs, underscores and the digits of other scripts.
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def read_count(variable: Variable, meaning: str, least: int = 1) -> int:
    """Read a count.

    Args:
        variable: the variable that holds it.
        meaning: the meaning of the number, for the error, such as ``the number of hosts``.
        least: the smallest valid value.

    Raises:
        UsageError: the value is not an integer of at least `least`.
    """
    count = parse_integer(variable.text)
    if count is None or count < least:
        raise variable.error(
            f"{variable.text!r} is not an integer of at least {least}", f"Write {meaning}, or unset it."
        )
    return count


def read_flag(variable: Variable) -> bool:
    """Read a boolean: ``1``, ``0``, ``true`` or ``false``.

    Raises:
        UsageError: the value is none of these.
    """
    flags = {"1": True, "true": True, "0": False, "false": False}
    if (flag := flags.get(variable.text.lower())) is None:
        raise variable.error(
            f"{variable.text!r} is neither true nor false",
            f"Write {variable.name}=1 or {variable.name}=0.",
        )
    return flag


def job_wait_s(environ: Mapping[str, str]) -> float:
    """Return how long to wait for another job to release the cores, in seconds; 0 if unset.

    Raises:
        UsageError: `POLYXLA_WAIT_S` is not a number from 0 to `LONGEST_WAIT_S`.
    """
    variable = find(environ, POLYXLA_WAIT_S)
    return read_seconds(variable) if variable else 0.0


def read_seconds(variable: Variable) -> float:
    """Read a wait, from 0 to `LONGEST_WAIT_S` seconds.

    Raises:
        UsageError: the value is not such a number.
    """
    try:
        seconds = float(variable.text)
    except ValueError:
        # This value fails the check below, as NaN does.
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_WAIT_S:
        raise variable.error(
            f"{variable.text!r} is not a number of seconds from 0 to {LONGEST_WAIT_S:.0f}",
            f"Write {variable.name}=600.",
        )
    return seconds


def stall_timeout_s(environ: Mapping[str, str]) -> float:
    """Return how long replicas may wait for each other, in seconds.

    Raises:
        UsageError: `POLYXLA_STALL_TIMEOUT_S` is not a number above 0.
    """
    variable = find(environ, POLYXLA_STALL_TIMEOUT_S)
    if variable is None:
        return bridge.stall_timeout_s({})
    try:
        # The bridge reads the same variable in the replicas, so both use one parser.
        return bridge.stall_timeout_s({variable.name: variable.text})
    except ValueError:
        raise variable.error(
            f"{variable.text!r} is not a number of seconds above 0", f"Write {POLYXLA_STALL_TIMEOUT_S}=300."
        ) from None


def mesh_connect_wait_s(environ: Mapping[str, str]) -> int:
    """Return how long to wait for the mesh service to answer for the first time, in seconds.

    Raises:
        UsageError: `XRT_MESH_CONNECT_WAIT` is not an integer of at least 1.
    """
    variable = find(environ, env.XRT_MESH_CONNECT_WAIT)
    return read_count(variable, "a number of seconds") if variable else MESH_CONNECT_WAIT_S
