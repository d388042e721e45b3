"""`World`: one replica's numbers among all replicas."""

from __future__ import annotations

from dataclasses import dataclass, fields

_INDICES = {
    "ordinal": "world_size",
    "local_ordinal": "local_world_size",
    "process_index": "process_count",
    "host_index": "host_count",
}
_COUNTS = {"local_world_size": "world_size", "process_count": "world_size", "host_count": "process_count"}
"""Which number limits each of the others."""


@dataclass(frozen=True)
class World:
    """One replica's numbers; docs/concepts.md defines the terms.

    Attributes:
        world_size: number of replicas (torchrun's WORLD_SIZE counts processes).
        ordinal: this replica's number, ``0 <= ordinal < world_size``; not necessarily contiguous per host.
        local_ordinal: its number among the replicas of its host.
        local_world_size: number of replicas on its host.
        process_index: number of its process among all processes.
        process_count: number of processes; smaller than `world_size` if replicas are threads.
        host_index: number of its host.
        host_count: number of hosts.

    Raises:
        ValueError: a number is not an integer, or out of its range.
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
                raise ValueError(f"{field.name}={value!r} is not an integer")
        for name, limit_name in _INDICES.items():
            value, limit = getattr(self, name), getattr(self, limit_name)
            if not 0 <= value < limit:
                raise ValueError(f"{name}={value} is not in 0 <= {name} < {limit_name}={limit}")
        for name, limit_name in _COUNTS.items():
            value, limit = getattr(self, name), getattr(self, limit_name)
            if not 1 <= value <= limit:
                raise ValueError(f"{name}={value} is not in 1 <= {name} <= {limit_name}={limit}")

    @property
    def shares_process(self) -> bool:
        """Whether replicas are threads of one process, and so share its memory."""
        return self.process_count < self.world_size

    @property
    def owns_process(self) -> bool:
        """Whether this is its process's first replica, which seeds and saves the process's generators."""
        return self.ordinal % (self.world_size // self.process_count) == 0
