"""What a replica is made of: `World`, its numbers; `Replication` and `Counters`, a runtime's; `Sharding`."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from polyxla.errors import UsageError
from polyxla.pytree import map_tensors

if TYPE_CHECKING:
    import torch


_INDICES = {
    "ordinal": "world_size",
    "local_ordinal": "local_world_size",
    "process_index": "process_count",
    "host_index": "host_count",
}
_COUNTS = {"local_world_size": "world_size", "process_count": "world_size", "host_count": "process_count"}
"""Which number limits each of the others."""


STEP_EVENT = "polyxla step"
"""Name of a step in a profile. The stat ``step_num`` is its number; ``_r`` marks steps for TensorBoard.
Source: `torch_xla.debug.profiler.StepTrace` of torch_xla 2.9.0.
"""


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
            # bool is an int in Python, and True would pass for ordinal 1.
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


class Counts(NamedTuple):
    """Totals since the replica's process started; replicas that are threads of one process share them.

    Attributes:
        compiles: programs that this process requested from the compiler or the persistent cache.
        executions: programs submitted to the device.
        host_reads: scalars that the host read (``.item()``, ``if tensor:``) and operations that it executed
            instead of the device; each waits for the device. Copies of whole tensors need not be counted.
        cache_hits: programs found in the persistent cache; 0 without a cache.
        cache_misses: programs that the persistent cache lacked or could not load; 0 without a cache.
    """

    compiles: int = 0
    executions: int = 0
    host_reads: int = 0
    cache_hits: int = 0
    cache_misses: int = 0

    def since(self, before: Counts) -> Counts:
        """Return the difference to the earlier counts `before`."""
        return Counts(*map(operator.sub, self, before))


@dataclass(frozen=True)
class Memory:
    """A device's memory, in bytes; `peak_bytes` is None if the runtime does not record it."""

    used_bytes: int
    limit_bytes: int
    peak_bytes: int | None = None


class Counters(ABC):
    """Reads one replica's counters. Called in the replica's thread; only `settle` waits for the device.

    Attributes:
        chip: the chip's name as its vendor spells it, such as ``TPU v4``; None if it is unknown or the device
            is emulated.
        is_eager: whether a step is many programs, submitted as its lines run, and not one.
    """

    chip: str | None = None
    is_eager: bool = False

    @abstractmethod
    def counts(self) -> Counts:
        """Return the totals. Called after every step, so it must not take more than a few microseconds."""

    def settle(self) -> None:  # noqa: B027 -- a runtime that counts at once has nothing to do
        """Wait until the counts include all that was submitted. Called when something is being compiled."""

    @abstractmethod
    def compile_s(self) -> float:
        """Return the seconds of all compilations, 0 if unknown. Called after each; may take 0.2 ms."""

    @abstractmethod
    def fallbacks(self) -> dict[str, int]:
        """Return how often each operation ran on the host because the device does not support it."""

    @abstractmethod
    def memory(self) -> Memory | None:
        """Return the device's memory; None if the runtime does not report it."""

    def is_submitted(self, tensor: torch.Tensor) -> bool:
        """Return whether the program that computes `tensor` was submitted: a read compiles nothing."""
        return True


class Sharding(ABC):
    """How the replicas divide the parameters of their modules. Used by the replica's thread only.

    Attributes:
        mesh: size of each dimension by its name.
        data_world: this replica's numbers among those that receive different records. Replicas that compute
            the same records together, as in tensor parallelism, have the same numbers.
    """

    mesh: Mapping[str, int]
    data_world: World

    @abstractmethod
    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> int:
        """Average those gradients of `optimizer`'s parameters that the backward pass has not averaged.

        Returns:
            How many parameters have no gradient in any replica, as far as that had to be found out.
        """

    @abstractmethod
    def clip(self, optimizer: torch.optim.Optimizer, norm: float | None, value: float | None) -> None:
        """Limit the norm of all gradients together, over all shards, and the size of their elements."""


ReduceOp = Literal["sum", "mean", "min", "max", "mul", "and", "or"]
"""How `all_reduce` combines the replicas' values."""


class Replication(ABC):
    """One replica's device and its connection to the other replicas. Used by that replica's thread only.

    All replicas call every collective, in the same order. A collective whose peer is lost must not return a
    result: it raises `polyxla.ReplicaLostError`, or the transport's exception. In a process that the launcher
    started, call `polyxla.launcher.failures.defer_to_launcher` before raising: the user sees the first error
    that the launcher receives, and the launcher's own names the process that died, its signal and its memory.

    Attributes:
        world: this replica's numbers among all replicas.
        device: the torch device it computes on.
        kind: the runtime's name for that device, such as ``CPU`` or ``TPU``.
    """

    world: World
    device: torch.device
    kind: str

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Combine every replica's `tensor` (same shape and dtype) elementwise and return the result."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every replica's `tensor` (same shape and dtype), in ordinal order."""

    @abstractmethod
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its mean over the replicas, which pass the same shapes and dtypes."""

    def optimizer_context(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Return the context in which `polyxla.Replica.step` calls ``optimizer.step()``.

        In it, a runtime that compiles programs keeps the optimizer's Python numbers inputs of them: they
        change from step to step.
        """
        return nullcontext()

    @abstractmethod
    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int] = ()) -> list[bytes]:
        """Wait until all `replicas` have called this; return their payloads in ordinal order.

        Args:
            tag: names the rendezvous in errors; the same in every replica.
            payload: any bytes; lengths may differ.
            replicas: ordinals of the participants, the same in each of them; empty means all replicas.
        """

    def to_device(self, value: Any) -> Any:
        """Return the pytree `value` with every tensor on the device."""
        return map_tensors(lambda tensor: tensor.to(self.device), value)

    def upload(self, batches: Generator[Any], prefetch: Mapping[str, int]) -> Generator[Any]:
        """Iterate over `batches` with their tensors on the device; a runtime may copy ahead.

        An exception in `batches` is raised in place of the batch that is missing.

        Args:
            batches: pytrees of tensors and numbers.
            prefetch: how far to copy ahead, by the runtime's option names.

        Raises:
            UsageError: the runtime has no option of that name.
        """
        if prefetch:
            raise UsageError(
                f"this runtime does not copy ahead and has no option {', '.join(sorted(prefetch))}",
                where="prefetch",
                fix="Leave prefetch out.",
            )
        for batch in batches:
            yield self.to_device(batch)

    @abstractmethod
    def sync(self, wait: bool = False) -> None:
        """Submit pending work to the device; with `wait`, block until it is done."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the device's random numbers."""

    @abstractmethod
    def rng_state(self) -> int:
        """Return the state of the device's random numbers; passing it to `seed` restores it."""

    def counters(self) -> Counters | None:
        """Return this replica's counters of compilations and transfers; None if the runtime has none."""
        return None

    def profile(self, folder: str) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context in which the device's work is traced into the directory `folder`.

        Its value is a function that takes a number and begins the step with that number in the trace.

        Raises:
            UsageError: the runtime has no profiler.
        """
        raise UsageError("this runtime has no profiler", where="profile", fix="Leave profile out.")

    @abstractmethod
    def report(self) -> str:
        """Return the runtime's report on its work, for ``strategy="debug"``."""

    @abstractmethod
    def close(self) -> None:
        """Finish pending work and disconnect. Called once, also after an error."""


class OnlyReplica(Replication):
    """The only replica of its job: every collective is the identity."""

    world = World()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Return the one replica's tensor."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the one replica's tensor."""
        return [tensor]

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave the tensors as they are: the mean over one replica."""

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int] = ()) -> list[bytes]:
        """Return the only payload."""
        return rendezvous_alone(tag, payload, replicas)


def rendezvous_alone(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Return the payload of the only replica; also what ``xm.rendezvous`` is in its process.

    Raises:
        ValueError: `replicas` names another one.
    """
    if any(ordinal != 0 for ordinal in replicas):
        raise ValueError(f"rendezvous {tag!r}: replicas={list(replicas)}, but there is only ordinal 0")
    return [payload]


def require_all(tag: str, replicas: Sequence[int], world_size: int) -> None:
    """Check that all replicas take part in a rendezvous, for runtimes whose rendezvous is a collective.

    Raises:
        UsageError: `replicas` names only some of them.
    """
    if replicas and sorted(replicas) != list(range(world_size)):
        raise UsageError(
            f"rendezvous {tag!r} of replicas {list(replicas)} out of {world_size}",
            where="replicas",
            fix="Leave replicas out: all of them must take part.",
        )


def padded(payload: bytes, size: int) -> bytes:
    """Return `payload` with zeros up to a power of two that is at least `size`.

    XLA compiles a program for each new size, so payloads that are gathered have few sizes.
    """
    return payload.ljust(1 << (size - 1).bit_length(), b"\0")
