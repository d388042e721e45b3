"""A PJRT plugin and how to open it, alone or with the other workers of a TPU slice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polyxla import UsageError
from polyxla_bridge.plugin_client.plugin import Option
from polyxla_xrt.config.workers import Worker, write_workers
from polyxla_xrt.proto import worker_pb2 as pb

TPU = "tpu"
"""The platform of libtpu's devices."""


@dataclass(frozen=True)
class SliceMembers:
    """The workers of a TPU slice, whose serving processes open it together.

    Attributes:
        workers: the workers of all hosts, in the order of the hosts.
        own: the index of this worker.
    """

    workers: tuple[Worker, ...]
    own: int

    def check(self, port: int) -> None:
        """Check that this worker listens where the list says.

        Raises:
            UsageError: it listens on another port.
        """
        if self.workers[self.own].port != port:
            raise UsageError(
                f"this worker, number {self.own}, is listed at {self.workers[self.own].address}, and listens "
                f"on port {port}",
                where="--slice, --address",
                fix="Write the same port.",
            )

    def name(self, index: int) -> str:
        """Return a worker as errors name it."""
        return f"worker {index} of the slice, at {self.workers[index].address}"

    def refusal(self, request: pb.LeaseRequest) -> str | None:
        """Return why a job cannot run on the slice; None if it can."""
        count = len(self.workers)
        if request.workers != count:
            return (
                f"this worker's TPU chips are part of a slice of {count} workers, and a job must have all of "
                f"them: {write_workers(self.workers)}"
            )
        # The job numbers its replicas by its own list of workers, and libtpu numbers the devices by the list
        # here.
        if request.worker != self.own:
            return (
                f"this is worker {self.own} of its slice, and the job lists it as worker {request.worker}; "
                f"the order must be {write_workers(self.workers)}"
            )
        return None


@dataclass(frozen=True)
class Library:
    """A PJRT plugin, and how to open it.

    Attributes:
        path: the plugin's file.
        source: where it was chosen, for errors.
        options: the plugin's own options for its client.
        variables: variables that only the serving process gets, before it opens the plugin.
        platform: the kind of the devices; empty if the plugin knows better.
        members: the workers of the TPU slice that the devices are part of; None for this host's alone.
    """

    path: Path
    source: str
    options: Mapping[str, Option] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    platform: str = ""
    members: SliceMembers | None = None

    def refusal(self, request: pb.LeaseRequest) -> str | None:
        """Return why a job cannot have the devices; None if it can."""
        if self.members:
            return self.members.refusal(request)
        if request.workers > 1:
            return (
                f"this worker serves jobs of one worker only; a job of {request.workers} workers needs CPU "
                "workers, or those of one TPU slice, started with --slice"
            )
        return None
