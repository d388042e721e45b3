"""The precision policies, and their base class. Imports torch only when a policy is used."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
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

        # A mode of this thread: torch.set_default_dtype would change the dtype in the threads of other
        # replicas.
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

        # By name, so that a policy can be made, described and pickled without torch.
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype


class Full32(Policy):
    """``32-true``: every floating-point parameter, buffer and input is float32."""

    name = "32-true"

    def __init__(self) -> None:
        super().__init__()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return nullcontext()


class BF16Mixed(Policy):
    """``bf16-mixed``: float32 weights; matrix products and convolutions in bfloat16.

    Inputs, gradients and the optimizer's state stay float32, and so do the operations that autocast keeps
    in float32, such as losses.
    """

    name = "bf16-mixed"

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast to bfloat16, for tensors on the CPU and on XLA devices."""
        from polyxla_precision.contexts import Autocast

        return Autocast(enabled=True)


class Precision16(BF16Mixed):
    """``16``: bf16-mixed under the number that meant bfloat16 on TPUs; it prints what it means."""

    def describe(self) -> str:
        """Return which 16-bit format this is."""
        return (
            "precision 16 means bfloat16 here: matrix products in bfloat16, weights, gradients and losses "
            "in float32 (bf16-mixed); write bf16-true to have the weights in bfloat16 too"
        )


class BF16True(Policy):
    """``bf16-true``: every floating-point parameter, buffer and input is bfloat16.

    It halves the memory and keeps no float32 copy of the weights: an update smaller than 1/512 of a weight
    rounds to zero, since nothing here rounds stochastically. `keep_float32` is for modules that need more
    precision.
    """

    name = "bf16-true"
    dtype_name = "bfloat16"
    casts_module_inputs = True

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context in which tensors created without a dtype are bfloat16.

        On XLA a float32 tensor would silently turn every computation that it enters into float32.
        """
        return self.module_init_context()

    def describe(self) -> str:
        """Return what bfloat16 weights cost."""
        return (
            "bf16-true keeps the weights and the optimizer's state in bfloat16: an update smaller than 1/512 "
            "of a weight is lost; bf16-mixed has float32 weights"
        )
