"""What a runtime gives each replica: the whole contract between `polyxla.Replica` and a runtime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from polyxla.contracts.world import World
from polyxla.errors import UsageError
from polyxla.pytree import map_tensors

if TYPE_CHECKING:
    import torch

    from polyxla.contracts.counters import Counters

ReduceOp = Literal["sum", "mean", "min", "max", "mul", "and", "or"]
"""How `all_reduce` combines the replicas' values."""


class Replication(ABC):
    """One replica's device and its links to the others. Used by that replica's thread only.

    Every collective is called by all replicas, in the same order.

    Attributes:
        world: where this replica stands.
        device: the torch device it computes on.
        kind: what the runtime calls that device, such as ``CPU`` or ``TPU``.
    """

    world: World
    device: torch.device
    kind: str

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Return the elementwise combination of every replica's `tensor` (same shape and dtype)."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every replica's `tensor` (same shape and dtype), in ordinal order."""

    @abstractmethod
    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace each gradient that `optimizer` holds by its mean over the replicas."""

    @abstractmethod
    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int] = ()) -> list[bytes]:
        """Wait until the `replicas` (default: all) are here; return their payloads in ordinal order.

        Args:
            tag: names the meeting in errors; the same in every replica.
            payload: any bytes; lengths may differ.
            replicas: ordinals that take part, the same in every one of them; empty means all.
        """

    def to_device(self, value: Any) -> Any:
        """Return `value` with every tensor in it (nested lists, tuples, dicts) on the device."""
        return map_tensors(lambda tensor: tensor.to(self.device), value)

    def upload(self, batches: Iterator[Any], prefetch: Mapping[str, int]) -> Generator[Any]:
        """Iterate over `batches` with their tensors on the device; a runtime may copy ahead.

        An exception in `batches` reaches the caller where the missing batch would have been.

        Args:
            batches: lists, tuples and dicts of tensors and numbers.
            prefetch: how far to copy ahead, in the runtime's own words.

        Raises:
            UsageError: the runtime does not know one of the words.
        """
        if prefetch:
            raise UsageError(
                f"this runtime copies nothing ahead, and has no {', '.join(sorted(prefetch))}",
                where="prefetch",
                fix="Leave it out.",
            )
        for batch in batches:
            yield self.to_device(batch)

    @abstractmethod
    def sync(self, wait: bool = False) -> None:
        """Hand pending work to the device; with `wait`, return when it is done."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the device's random numbers."""

    @abstractmethod
    def rng_state(self) -> int:
        """Return where the device's random numbers stand; `seed` with it goes on from there."""

    def counters(self) -> Counters | None:
        """Return what counts this replica's compilations and transfers; None where nothing can."""
        return None

    def profile(self, folder: str) -> AbstractContextManager[None]:
        """Return a context in which what the device does is traced into `folder`.

        Raises:
            UsageError: the runtime has no profiler.
        """
        raise UsageError("this runtime has no profiler", where="profile", fix="Leave it out.")

    @abstractmethod
    def report(self) -> str:
        """Return the runtime's own account of what it did, for ``strategy="debug"``."""

    @abstractmethod
    def close(self) -> None:
        """Finish pending work and leave; called once, also after an error."""
