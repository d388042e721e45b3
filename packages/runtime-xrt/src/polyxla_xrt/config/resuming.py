"""How a job goes on after the loss of its worker, read from the user's variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyxla import UsageError
from polyxla_xrt import env
from polyxla_xrt.config.addresses import join_address, read_address
from polyxla_xrt.config.configuration import Configuration
from polyxla_xrt.config.timeouts import read_seconds
from polyxla_xrt.config.variables import find, read_count

SNAPSHOT_EVERY = 100
"""Default of `POLYXLA_XRT_SNAPSHOT_EVERY`."""


@dataclass(frozen=True)
class Resuming:
    """How a job goes on after the loss of its worker.

    Attributes:
        wait_s: longest wait for a worker, in seconds.
        every: number of programs from one snapshot of the arrays to the next.
        spares: ``host:port`` of the workers that may take the job instead.
    """

    wait_s: float
    every: int
    spares: tuple[str, ...]


def read_resuming(environ: Mapping[str, str]) -> Resuming | None:
    """Return how the job goes on; None if the loss of its worker ends it.

    Raises:
        UsageError: a variable has an invalid value.
    """
    wait = find(environ, env.POLYXLA_XRT_RESUME)
    wait_s = read_seconds(wait) if wait else 0.0
    every, spares = find(environ, env.POLYXLA_XRT_SNAPSHOT_EVERY), find(environ, env.POLYXLA_XRT_SPARES)
    count = read_count(every, "the number of programs between two snapshots") if every else SNAPSHOT_EVERY
    addresses = [read_address(spares, text.strip()) for text in spares.text.split(",")] if spares else []
    if not wait_s:
        return None
    return Resuming(wait_s, count, tuple(join_address(*address) for address in addresses))


def refuse_resuming(configuration: Configuration, environ: Mapping[str, str]) -> None:
    """Refuse what a job on several workers cannot do: they would have to be replaced together.

    Raises:
        UsageError: the environment asks for it.
    """
    if configuration.hosts > 1 and read_resuming(environ):
        raise UsageError(
            f"a job on {configuration.hosts} workers cannot go on after the loss of one",
            where=f"{env.POLYXLA_XRT_RESUME}={environ[env.POLYXLA_XRT_RESUME]}",
            fix=f"Unset {env.POLYXLA_XRT_RESUME}, and resume from a checkpoint; or use one worker.",
        )
