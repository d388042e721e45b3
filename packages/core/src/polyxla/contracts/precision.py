"""The contract of a precision policy. Plugins bring policies through the hook `polyxla_precision`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Precision(Protocol):
    """A policy of number formats: the dtypes of parameters, inputs, arithmetic and losses.

    `describe` runs in the launching process, everything else in the replica's process and thread. Each
    replica looks a named policy up for itself; a policy that is passed as an object may be shared by the
    replicas of one process, so its methods must be safe to call from several threads, and a context must
    affect only the thread that enters it. A policy that is sent to other processes must pickle.

    Only `convert_module` may refuse: it raises ValueError, which `Replica.setup` reports as a UsageError
    together with the policy's name. Any other exception ends the replica unchanged.

    Attributes:
        name: such as ``bf16-mixed``; it is written into checkpoints.
    """

    name: str

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which to create modules, on the host or on the device.

        For loops of the user's own: `Trainer` is passed a module that exists already.
        """

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return `module` with its parameters in the policy's dtype; in place is fine.

        Called once for each `Replica.setup`, before the module moves to the device: a module that was
        created on the host is converted there.

        Raises:
            ValueError: the policy does not fit the module; the text says why, and what to write instead.
        """

    def convert_input(self, batch: Any) -> Any:
        """Return the batch with the floating-point tensors of its pytree in the dtype to compute with.

        Called for each micro-step with a batch that is on the device already, within `forward_context`.
        """

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context in which to compute the loss; the gradient is computed outside.

        Entered for each micro-step, so a policy that returns the same object must allow that.
        """

    def convert_output(self, value: torch.Tensor) -> torch.Tensor:
        """Return a loss or metric in float32, if the policy computes in less.

        Called for each micro-step on the device's tensor, within `forward_context`. It must not wait for
        the device.
        """

    def describe(self) -> str:
        """Return one line to print before training, such as what ``16`` means; empty for nothing.

        Called once, in the launching process.
        """


class UnchangedPrecision:
    """The policy when none is named: every tensor keeps the dtype that it was created with."""

    name = "as-made"

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return nullcontext()

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return `module` itself."""
        return module

    def convert_input(self, batch: Any) -> Any:
        """Return `batch` itself."""
        return batch

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return nullcontext()

    def convert_output(self, value: torch.Tensor) -> torch.Tensor:
        """Return `value` itself."""
        return value

    def describe(self) -> str:
        """Return nothing to print."""
        return ""
