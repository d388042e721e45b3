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


class Precision(Protocol):
    """A policy of number formats. The same object serves every step of one replica."""

    name: str

    def init(self) -> AbstractContextManager[Any]:
        """Return the context in which to create modules."""

    def convert(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return `module` with its parameters in the policy's dtype; in place is fine."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context in which to compute the loss."""


class AsMade:
    """The policy without a name: every tensor keeps the dtype that its maker gave it."""

    name = "as-made"

    def init(self) -> AbstractContextManager[Any]:
        """Change nothing."""
        return nullcontext()

    def convert(self, module: torch.nn.Module) -> torch.nn.Module:
        """Change nothing."""
        return module

    def forward(self) -> AbstractContextManager[Any]:
        """Change nothing."""
        return nullcontext()


def find_precision(plugins: pluggy.PluginManager, asked: Setting) -> Precision:
    """Ask the plugins for a policy.

    Raises:
        UsageError: no installed plugin knows the name.
    """
    if asked.value is None:
        return AsMade()
    policy: Precision | None = plugins.hook.polyxla_precision(name=str(asked.value))
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
    return "Write precision='32-true', or leave it out to keep the module's own dtypes."
