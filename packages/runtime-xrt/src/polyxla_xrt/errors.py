"""The errors of connections between a job's processes, and between them and workers."""

from __future__ import annotations

from polyxla import PolyxlaError


class ServiceError(PolyxlaError):
    """A service on the network is unreachable, or a call to it failed.

    Args:
        what: what went wrong, a sentence without its full stop.
        where: the service, and the setting that names it.
        fix: what to check, a sentence with its full stop.
    """

    def __init__(self, what: str, *, where: str, fix: str) -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what} (from {self.where}). {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        # The dictionary is passed on, because it holds the notes that name the replica.
        return (_rebuild, (type(self), self.what, self.where, self.fix), self.__dict__)


class WorkerError(ServiceError):
    """A worker cannot be used."""


class WorkerConnectError(WorkerError):
    """Nothing answers at the worker's address, or something other than a worker does."""


class WorkerRefusedError(WorkerError):
    """The worker rejects this client: its token is wrong, or it speaks another protocol version."""


class WorkerHeldError(WorkerError):
    """Another job holds the worker's cores."""


class WorkerLostError(WorkerError):
    """The worker went away during a job, or ended the job."""


class MeshError(ServiceError):
    """A process cannot meet the others."""


class MeshConnectError(MeshError):
    """Nothing answers at the mesh service's address in time, or something other than a mesh service does."""


class MeshRefusedError(MeshError):
    """The mesh service rejects this process."""


class MeshServiceLostError(MeshError):
    """The mesh service went away."""


class RendezvousError(MeshError):
    """A rendezvous failed; every participant gets this error."""


class MismatchError(RendezvousError):
    """Its participants contradict each other: different replicas, a duplicate or an invalid ordinal."""


class MissingError(RendezvousError):
    """Some participants did not arrive in time."""


class ParticipantLostError(RendezvousError):
    """Some participants cannot arrive any more: they died, or said goodbye."""


def _rebuild(kind: type[ServiceError], what: str, where: str, fix: str) -> ServiceError:
    return kind(what, where=where, fix=fix)
