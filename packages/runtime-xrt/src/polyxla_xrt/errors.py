"""What goes wrong between the processes of a job, and between them and workers."""

from __future__ import annotations

from polyxla.errors import PolyxlaError


class ServiceError(PolyxlaError):
    """A service on the network was not there, or did not do what it was asked.

    Args:
        what: what went wrong, a sentence without its full stop.
        where: the service, and where it was named.
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
        # With the dictionary, which holds the notes that say which replica it was.
        return (_rebuild, (type(self), self.what, self.where, self.fix), self.__dict__)


class WorkerError(ServiceError):
    """A worker could not be used."""


class WorkerConnectError(WorkerError):
    """Nothing answers at the worker's address, or something else does."""


class WorkerRefusedError(WorkerError):
    """The worker lets this client do nothing: it lacks the token, or speaks another protocol."""


class WorkerHeldError(WorkerError):
    """Another job has the worker's cores."""


class WorkerLostError(WorkerError):
    """The worker went away in the middle of a job, or ended the job."""


class MeshError(ServiceError):
    """A process could not meet the others."""


class MeshConnectError(MeshError):
    """The mesh service was not there in time, or something else was."""


class MeshRefusedError(MeshError):
    """The mesh service does not let this process take part."""


class MeshServiceLostError(MeshError):
    """The mesh service went away, or answers no more."""


class RendezvousError(MeshError):
    """A rendezvous failed; every participant of its tag is told."""


class MismatchError(RendezvousError):
    """Its participants contradict each other: other replicas, a duplicate or an invalid ordinal."""


class MissingError(RendezvousError):
    """Some did not arrive in time."""


class ParticipantLostError(RendezvousError):
    """Some cannot arrive any more: they died, or said goodbye."""


def _rebuild(kind: type[ServiceError], what: str, where: str, fix: str) -> ServiceError:
    return kind(what, where=where, fix=fix)
