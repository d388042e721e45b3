"""How a job's replicas are spread over hosts, processes and threads."""

from __future__ import annotations

from dataclasses import dataclass

from polyxla.contracts.world import World


@dataclass(frozen=True)
class Layout:
    """Numbers of threads, processes and hosts; ordinals count through them in that order.

    Attributes:
        threads: replicas in each process.
        processes: processes on each host.
        hosts: number of hosts; emulated ones may all be this machine.
    """

    threads: int = 1
    processes: int = 1
    hosts: int = 1

    @property
    def process_count(self) -> int:
        """Number of processes on all hosts."""
        return self.processes * self.hosts

    @property
    def replicas(self) -> int:
        """The world size."""
        return self.threads * self.process_count

    def __str__(self) -> str:
        hosts = f"{self.hosts} hosts x " if self.hosts > 1 else ""
        return f"{hosts}{self.processes} processes x {self.threads} threads"

    def world(self, process: int, thread: int) -> World:
        """Return where the replica in a thread of a process stands."""
        host, local_process = divmod(process, self.processes)
        return World(
            world_size=self.replicas,
            ordinal=process * self.threads + thread,
            local_ordinal=local_process * self.threads + thread,
            local_world_size=self.processes * self.threads,
            process_index=process,
            process_count=self.process_count,
            host_index=host,
            host_count=self.hosts,
        )
