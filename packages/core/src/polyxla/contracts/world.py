"""Where one replica stands among all of them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class World:
    """The numbers of one replica; the words are those of docs/concepts.md.

    Attributes:
        world_size: number of replicas (not of processes, which torchrun's WORLD_SIZE counts).
        ordinal: this replica's number, ``0 <= ordinal < world_size``; not promised contiguous per host.
        local_ordinal: its number among the replicas of its host.
        local_world_size: number of replicas on its host.
        process_index: number of its process among all processes.
        process_count: number of processes; smaller than `world_size` where replicas are threads.
        host_index: number of its host.
        host_count: number of hosts.

    Raises:
        ValueError: a number is out of its range.
    """

    world_size: int = 1
    ordinal: int = 0
    local_ordinal: int = 0
    local_world_size: int = 1
    process_index: int = 0
    process_count: int = 1
    host_index: int = 0
    host_count: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{field.name}={value!r} is not a whole number")
        _check_below("ordinal", self.ordinal, "world_size", self.world_size)
        _check_below("local_ordinal", self.local_ordinal, "local_world_size", self.local_world_size)
        _check_below("process_index", self.process_index, "process_count", self.process_count)
        _check_below("host_index", self.host_index, "host_count", self.host_count)
        _check_at_most("local_world_size", self.local_world_size, "world_size", self.world_size)
        _check_at_most("process_count", self.process_count, "world_size", self.world_size)
        _check_at_most("host_count", self.host_count, "process_count", self.process_count)

    @property
    def shares_process(self) -> bool:
        """Whether replicas are threads of one process, and so see each other's objects."""
        return self.process_count < self.world_size

    @property
    def owns_process(self) -> bool:
        """Whether this is the first replica of its process: it alone seeds and saves the process's generators."""
        return self.ordinal % (self.world_size // self.process_count) == 0


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if not 0 <= value < limit:
        raise ValueError(f"{name}={value} is not in 0 <= {name} < {limit_name}={limit}")


def _check_at_most(name: str, value: int, limit_name: str, limit: int) -> None:
    if not 1 <= value <= limit:
        raise ValueError(f"{name}={value} is not in 1 <= {name} <= {limit_name}={limit}")
