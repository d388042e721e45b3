"""One launch as data: what every replica runs, and on what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from polyxla.env import Setting

ProcessMethod = Literal["spawn", "forkserver", "fork"]
"""How a process for replicas is made: a fresh Python, a fork of the fork server, or a fork of this process."""
StartMethod = Literal["auto", "inline", "spawn", "forkserver", "fork"]
"""How replicas start: ``inline`` in the calling process (one replica), ``spawn`` in fresh processes,
``forkserver`` in forks of a fresh process that has imported what they all need, ``fork`` in forks of the
calling process, which inherit its memory."""


@dataclass(frozen=True)
class Job:
    """One launch. It is pickled and sent to the replicas' processes.

    Attributes:
        function: called as ``function(replica, *args)``.
        args: the rest of its arguments.
        runtime: the chosen runtime's name.
        devices: indices of the devices, one per replica.
        environ: the environment that a replica's process starts with.
        precision: the precision policy or its name, with its origin.
        start_method: how the replicas start.
        seed: seed of the devices' random numbers: torch's seed in the launching process.
        main: what runs in each replica, as ``main(job, place)``: `polyxla.launcher.replica_main.run_replica`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    runtime: str
    devices: tuple[int, ...]
    environ: Mapping[str, str]
    precision: Setting
    start_method: StartMethod = "auto"
    seed: int = 0
    main: Callable[[Job, Any], Any] = field(kw_only=True)

    @property
    def process_method(self) -> ProcessMethod | None:
        """How a replica's process is made; None where it may run in this one."""
        return None if self.start_method in ("auto", "inline") else cast("ProcessMethod", self.start_method)

    def run(self, place: Any = None) -> Any:
        """Run one replica: the runtime calls this once in each replica's process and thread.

        Args:
            place: passed to the runtime's `polyxla_replication`; identifies the replica.
        """
        return self.main(self, place)
