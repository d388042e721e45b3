"""The assignment of a process, which the launcher passes in `POLYXLA_XRT_ASSIGNMENT`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from polyxla_xrt import env


@dataclass(frozen=True)
class Assignment:
    """What a process needs to drive its cores.

    Attributes:
        address: ``host:port`` of the worker.
        job: the worker's key for the job.
        cores: the cores that the process drives, numbered among those of the worker that the job holds.
        kind: the devices' kind, such as ``TPU``.
        ordinal: ordinal of the first of these cores.
        world_size: number of cores of the job.
        process_index: index of this process.
        process_count: number of processes of the job.
    """

    address: str
    job: str
    cores: tuple[int, ...]
    kind: str
    ordinal: int
    world_size: int
    process_index: int
    process_count: int

    def write(self) -> str:
        """Return the value of the variable."""
        return json.dumps(asdict(self))


def read_assignment(environ: Mapping[str, str]) -> Assignment | None:
    """Read the assignment of this process; None if no launcher made one."""
    text = environ.get(env.POLYXLA_XRT_ASSIGNMENT)
    if not text:
        return None
    fields = json.loads(text)
    # JSON has no tuples, so the cores arrive as a list.
    return Assignment(**{**fields, "cores": tuple(fields["cores"])})
