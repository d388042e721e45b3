"""What a precision policy must offer; `polyxla_precision` plugins bring the policies."""

from __future__ import annotations

import importlib.metadata
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from polyxla.env import Setting
from polyxla.errors import UsageError

if TYPE_CHECKING:
    import pluggy
    import torch

DISTRIBUTION = "polyxla-precision"
"""Where the usual policies come from."""
FIX = "Write precision='bf16-mixed' or '32-true', or leave it out to keep the module's own dtypes."


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


def find_precision(plugins: pluggy.PluginManager, asked: Setting) -> Precision:
    """Return the policy that was asked for: an object that is one, or what the plugins have under its name.

    Raises:
        UsageError: no installed plugin knows the name, or one refuses it with a reason.
    """
    if asked.value is None:
        return AsMade()
    if hasattr(asked.value, "forward"):
        given: Precision = asked.value
        return given
    try:
        policy: Precision | None = plugins.hook.polyxla_precision(name=str(asked.value))
    except ValueError as error:
        raise UsageError(str(error), where=asked.origin, fix=FIX) from None
    if policy is None:
        raise UsageError(
            f"no installed plugin knows the precision {asked.value!r}", where=asked.origin, fix=_fix()
        )
    return policy


def _fix() -> str:
    try:
        importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"Install the usual policies: pip install {DISTRIBUTION}"
    return FIX
