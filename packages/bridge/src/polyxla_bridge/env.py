"""The variables that say which replicas a bridge's process holds; a launcher gives them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

PJRT_CPU = "CPU_POLYXLA"
"""The value of ``PJRT_DEVICE`` that chooses the bridge; torch_xla calls the device ``CPU``."""

POLYXLA_BRIDGE_REPLICAS = "POLYXLA_BRIDGE_REPLICAS"
"""Number of replicas of the job.
Default: 1.
"""

POLYXLA_BRIDGE_PROCESSES = "POLYXLA_BRIDGE_PROCESSES"
"""Number of processes, which hold equal shares of the replicas.
Default: 1.
"""

POLYXLA_BRIDGE_PROCESS = "POLYXLA_BRIDGE_PROCESS"
"""This process's number.
Default: 0.
"""

POLYXLA_BRIDGE_COORDINATOR = "POLYXLA_BRIDGE_COORDINATOR"
"""``host:port`` where replicas meet; process 0 listens there.
Default: none, which is right for one replica only.
"""


@dataclass(frozen=True)
class Share:
    """Which replicas there are, and which of them this process holds."""

    replicas: int = 1
    processes: int = 1
    process: int = 0
    coordinator: str = ""

    @property
    def per_process(self) -> int:
        """Replicas in each process."""
        return self.replicas // self.processes

    @property
    def local(self) -> tuple[int, ...]:
        """This process's replicas."""
        return tuple(range(self.process * self.per_process, (self.process + 1) * self.per_process))


def from_environ(environ: Mapping[str, str]) -> Share:
    """Read this process's share.

    Raises:
        ValueError: the numbers do not fit together.
    """
    share = Share(
        replicas=int(environ.get(POLYXLA_BRIDGE_REPLICAS, "1")),
        processes=int(environ.get(POLYXLA_BRIDGE_PROCESSES, "1")),
        process=int(environ.get(POLYXLA_BRIDGE_PROCESS, "0")),
        coordinator=environ.get(POLYXLA_BRIDGE_COORDINATOR, ""),
    )
    if share.replicas < 1 or share.processes < 1 or share.replicas % share.processes:
        raise ValueError(f"{share.replicas} replicas cannot be shared equally by {share.processes} processes")
    if not 0 <= share.process < share.processes:
        raise ValueError(f"{POLYXLA_BRIDGE_PROCESS}={share.process} is not in 0..{share.processes - 1}")
    if share.replicas > 1 and not share.coordinator:
        raise ValueError(f"{share.replicas} replicas need {POLYXLA_BRIDGE_COORDINATOR} to meet")
    return share


def current() -> Share:
    """Read this process's share from its own environment."""
    return from_environ(os.environ)
