"""Where a process of a job stands: its worker, its cores, its numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from polyxla_bridge.engine.engine import EngineDevice
from polyxla_xrt import env


@dataclass(frozen=True)
class Place:
    """What a process must know to drive its cores. It travels in an environment variable.

    Attributes:
        address: ``host:port`` of the worker.
        job: the key that the worker gave to the job.
        cores: the cores that the process drives, by their number among the worker's that the job has.
        kind: what the devices are called, such as ``TPU``.
        ordinal: of the first of these cores among all of the job.
        world_size: cores of the job.
        process_index: this process's number.
        process_count: processes of the job.
    """

    address: str
    job: str
    cores: tuple[int, ...]
    kind: str
    ordinal: int
    world_size: int
    process_index: int
    process_count: int

    def devices(self) -> tuple[EngineDevice, ...]:
        """Return every device of the job; each process has as many."""
        each = self.world_size // self.process_count
        return tuple(
            EngineDevice(index, index // each, index // each == self.process_index, f"{self.kind} core")
            for index in range(self.world_size)
        )

    def write(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))


def read_place(environ: Mapping[str, str]) -> Place | None:
    """Read the place that a launcher gave this process; None where it was given none."""
    text = environ.get(env.POLYXLA_XRT_PLACE)
    if not text:
        return None
    fields = json.loads(text)
    return Place(**{**fields, "cores": tuple(fields["cores"])})
