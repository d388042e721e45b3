"""The base class of the policies. It imports torch only when it is used."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Policy:
    """A precision policy: the dtypes of parameters, inputs, arithmetic and losses, on any device.

    It can be pickled, and threads may share it: a context affects only the thread that enters it.

    Args:
        keep_float32: submodules whose parameters stay float32 and which compute in float32, as dotted
            names (``encoder.norm``) or patterns (``*norm*``), each with all modules inside it.

    Raises:
        ValueError: `keep_float32` is one string.
    """

    name: str
    dtype_name = "float32"
    """The dtype of parameters and of floating-point buffers and inputs: the name of torch's attribute."""
    casts_module_inputs = False
    """Whether modules with parameters cast their inputs to their dtype, because autocast does not."""

    def __init__(self, keep_float32: Iterable[str] = ()) -> None:
        if isinstance(keep_float32, str):
            raise ValueError(f"keep_float32 takes several names; write keep_float32=({keep_float32!r},)")
        self.keep_float32 = tuple(keep_float32)

    def __repr__(self) -> str:
        keep_float32 = f"keep_float32={self.keep_float32}" if self.keep_float32 else ""
        return f"{type(self).__name__}({keep_float32})"

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which modules are created with parameters in the policy's dtype.

        A dtype that the module states itself is not changed here; `convert_module` changes it.
        """
        from polyxla_precision.contexts import DefaultDtype

        return DefaultDtype(self._dtype())

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert the module's floating-point parameters and buffers to the policy's dtype, in place.

        Call it before you create the optimizer. A module can be converted again, also by another policy.

        Raises:
            ValueError: `keep_float32` names no submodule, or one that shares a parameter with others.
        """
        from polyxla_precision import keep_float32

        kept = keep_float32.find_modules(module, self.keep_float32)
        keep_float32.convert_tensors(module, self._dtype(), kept)
        keep_float32.attach_casts(module, kept, cast_others=self.casts_module_inputs)
        return module

    def convert_input(self, batch: Any) -> Any:
        """Return the batch with its floating-point tensors, float64 included, in the parameters' dtype.

        Tensors in lists, tuples, named tuples, mappings and dataclasses are converted, and the containers
        keep their types. Integers, bools and all other objects stay as they are.
        """
        from polyxla_precision.pytree import cast_floats

        return cast_floats(batch, self._dtype())

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context in which to compute the loss; compute the gradient outside."""
        raise NotImplementedError

    def convert_output(self, value: Any) -> Any:
        """Return a loss, or a pytree of metrics, with bfloat16 tensors in float32."""
        from polyxla_precision.pytree import upcast_half

        return upcast_half(value)

    def describe(self) -> str:
        """Return a line to print before training, or an empty string."""
        return ""

    def _dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype
