"""What a precision policy must offer; `polyxla_precision` plugins bring the policies."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Precision(Protocol):
    """A policy of number formats. The same object serves every step of one replica.

    Attributes:
        name: such as ``bf16-mixed``.
    """

    name: str

    def init(self) -> AbstractContextManager[Any]:
        """Return the context in which to create modules."""

    def convert(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return `module` with its parameters in the policy's dtype; in place is fine."""

    def inputs(self, batch: Any) -> Any:
        """Return `batch` with the floating-point tensors of the nest in the dtype to compute with."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context in which to compute the loss."""

    def loss(self, value: torch.Tensor) -> torch.Tensor:
        """Return a loss or metric in float32, where a policy computes in less."""

    def describe(self) -> str:
        """Return what a person must be told once, such as that 16 is not float16 here; empty for nothing."""


class AsMade:
    """The policy without a name: every tensor keeps the dtype that its maker gave it."""

    name = "as-made"

    def init(self) -> AbstractContextManager[Any]:
        """Change nothing."""
        return nullcontext()

    def convert(self, module: torch.nn.Module) -> torch.nn.Module:
        """Change nothing."""
        return module

    def inputs(self, batch: Any) -> Any:
        """Change nothing."""
        return batch

    def forward(self) -> AbstractContextManager[Any]:
        """Change nothing."""
        return nullcontext()

    def loss(self, value: torch.Tensor) -> torch.Tensor:
        """Change nothing."""
        return value

    def describe(self) -> str:
        """Say nothing."""
        return ""
