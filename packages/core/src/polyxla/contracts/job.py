"""`Job`: one launch as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from polyxla.env import Setting
from polyxla.process_settings import ProcessSettings

ProcessMethod = Literal["spawn", "forkserver", "fork"]
"""How a replica process is made: a fresh Python, a fork of the fork server, or a fork of this process."""
StartMethod = Literal["auto", "inline", "spawn", "forkserver", "fork"]
"""How replicas start: ``inline`` in the calling process (one replica only), ``spawn`` in fresh processes,
``forkserver`` in forks of a process that has imported the heavy modules, ``fork`` in forks of the calling
process, which inherit its memory; ``auto`` leaves the choice to the runtime."""


class ReplicaResult(NamedTuple):
    """What a replica returns to the launching process.

    Attributes:
        ordinal: the replica's ordinal, which only the replica itself knows.
        value: what its function returned.
        summaries: what its plugins returned from `polyxla.hookspecs.polyxla_replica_summary`.
    """

    ordinal: int
    value: Any
    summaries: Sequence[Any] = ()


@dataclass(frozen=True)
class Job:
    """One launch. It is pickled and sent to the replica processes.

    Attributes:
        function: the user's function, called as ``function(replica, *args)``.
        args: its other arguments.
        runtime: the chosen runtime's name.
        devices: indices of the devices, one per replica.
        environ: the environment of the replica processes.
        precision: the precision policy or its name, with its origin.
        start_method: how the replicas start.
        seed: seed of the devices' random numbers: torch's seed in the launching process.
        settings: what the launching process has set for itself; None if the replicas are whole programs,
            which set it themselves.
        own_processes: whether each replica needs a process of its own, because it runs a whole program.
        main: the replica's entry point, ``main(job, place)``: `polyxla.launcher.launch.run_replica`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    runtime: str
    devices: tuple[int, ...]
    environ: Mapping[str, str]
    precision: Setting
    start_method: StartMethod = "auto"
    seed: int = 0
    settings: ProcessSettings | None = None
    own_processes: bool = False
    main: Callable[[Job, Any], Any] = field(kw_only=True)

    @property
    def process_method(self) -> ProcessMethod | None:
        """How a replica process is made; None if the replica may run in this process."""
        return None if self.start_method in ("auto", "inline") else cast("ProcessMethod", self.start_method)

    def run(self, place: Any = None) -> Any:
        """Run one replica and return its result, opaque to the runtime, which calls this once in its thread.

        Args:
            place: the runtime's description of the replica, passed on to its `polyxla_replication`.
        """
        return self.main(self, place)
