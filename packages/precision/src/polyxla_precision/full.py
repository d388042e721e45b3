"""Full precision: float32 weights, float32 arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Full32:
    """``32-true``: every floating-point parameter and buffer is float32."""

    name = "32-true"

    @contextlib.contextmanager
    def init(self) -> Iterator[None]:
        """Create modules with float32 parameters, whatever torch's default dtype is."""
        import torch

        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def convert(self, module: torch.nn.Module) -> torch.nn.Module:
        """Make the module's floating-point parameters and buffers float32, in place."""
        return module.float()

    def forward(self) -> AbstractContextManager[Any]:
        """Compute in the parameters' dtype."""
        return nullcontext()
