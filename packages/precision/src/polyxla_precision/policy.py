"""What the policies have in common. It imports torch only when it is used."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Policy:
    """A policy of number formats, for modules on any device of one replica.

    It can be pickled, and threads may share it: a context is of the thread that enters it.

    Args:
        keep_float32: submodules whose parameters stay float32 and which compute in float32, as dotted
            names (``encoder.norm``) or patterns (``*norm*``). A submodule's own submodules go with it.

    Raises:
        ValueError: `keep_float32` is one string.
    """

    name: str
    weights = "float32"
    """The dtype of parameters and of floating-point buffers and inputs, as torch's attribute."""
    casts_inputs = False
    """Whether modules with parameters cast their inputs to their dtype; autocast does it elsewhere."""

    def __init__(self, keep_float32: Iterable[str] = ()) -> None:
        if isinstance(keep_float32, str):
            raise ValueError(f"keep_float32 takes several names; write keep_float32=({keep_float32!r},)")
        self.keep_float32 = tuple(keep_float32)

    def __repr__(self) -> str:
        keep_float32 = f"keep_float32={self.keep_float32}" if self.keep_float32 else ""
        return f"{type(self).__name__}({keep_float32})"

    def init(self) -> AbstractContextManager[Any]:
        """Return the context in which modules are made with parameters in the policy's dtype.

        What it does not reach, such as a dtype that a module names, is left to `convert`.
        """
        from polyxla_precision.contexts import DefaultDtype

        return DefaultDtype(self._dtype())

    def convert(self, module: torch.nn.Module) -> torch.nn.Module:
        """Bring the module's floating-point parameters and buffers into the policy's dtype, in place.

        Call it before the optimizer is made; converting twice, or under another policy, is fine.

        Raises:
            ValueError: `keep_float32` names no submodule, or one that shares a parameter with others.
        """
        from polyxla_precision import keep_float32

        found = keep_float32.find(module, self.keep_float32)
        keep_float32.convert(module, self._dtype(), found)
        keep_float32.attach(module, found, cast_others=self.casts_inputs)
        return module

    def inputs(self, batch: Any) -> Any:
        """Return the batch with its floating-point tensors, float64 too, in the parameters' dtype.

        Lists, tuples, named tuples, mappings and dataclasses are entered and keep their types; integers,
        bools and any other objects stay as they are.
        """
        from polyxla_precision.pytree import cast_floats

        return cast_floats(batch, self._dtype())

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context in which to compute the loss, but not its gradient."""
        raise NotImplementedError

    def loss(self, value: Any) -> Any:
        """Return a loss, or a nest of logged metrics, with bfloat16 tensors in float32."""
        from polyxla_precision.pytree import widen

        return widen(value)

    def describe(self) -> str:
        """Return a line that a person should read once, or nothing."""
        return ""

    def _dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.weights)
        return dtype
