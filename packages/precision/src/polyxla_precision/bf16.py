"""The bfloat16 policies: for arithmetic only, or for the weights too."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from polyxla_precision.policy import Policy


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
