"""`Replication`: the contract between `polyxla.Replica` and a runtime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from polyxla.contracts.world import World
from polyxla.errors import UsageError
from polyxla.pytree import map_tensors

if TYPE_CHECKING:
    import torch

    from polyxla.contracts.counters import Counters

ReduceOp = Literal["sum", "mean", "min", "max", "mul", "and", "or"]
"""How `all_reduce` combines the replicas' values."""
STEP_EVENT = "polyxla step"
"""Name of a step in a profile. The stat ``step_num`` is its number; ``_r`` marks steps for TensorBoard.
Source: `torch_xla.debug.profiler.StepTrace` of torch_xla 2.9.0.
"""


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
