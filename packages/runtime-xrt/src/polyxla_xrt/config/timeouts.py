"""The waits that a user may set, each read from its variable."""

from __future__ import annotations

from collections.abc import Mapping

from polyxla.plugin import POLYXLA_WAIT_S
from polyxla_bridge import env as bridge
from polyxla_bridge.env import POLYXLA_STALL_TIMEOUT_S
from polyxla_xrt import env
from polyxla_xrt.config.variables import Variable, find, read_count

LONGEST_WAIT_S = 7 * 24 * 3600.0
"""Longest wait that may be requested, in seconds: for other replicas, or for another job's cores."""
MESH_CONNECT_WAIT_S = 300
"""Default of `mesh_connect_wait_s`. Source: torch_xla 1.13, mesh_service.cc."""


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
