"""The policies with bfloat16: for arithmetic only, or for weights too."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from polyxla_precision.policy import Policy


class BF16Mixed(Policy):
    """``bf16-mixed``: float32 weights; matrix products and convolutions in bfloat16.

    Inputs stay float32, and so do gradients, the optimizer's state, and the operations that autocast
    knows to need it, such as losses.
    """

    name = "bf16-mixed"

    def forward(self) -> AbstractContextManager[Any]:
        """Return autocast to bfloat16, for tensors on the CPU and on XLA's devices."""
        from polyxla_precision.contexts import Autocast

        return Autocast(enabled=True)


class Sixteen(BF16Mixed):
    """``16``: bf16-mixed, asked for by the number that meant bfloat16 on TPUs, which it says."""

    def describe(self) -> str:
        """Say which 16 bits these are."""
        return (
            "precision 16 means bfloat16 here: matrix products in bfloat16, weights, gradients and losses "
            "in float32 (bf16-mixed); write bf16-true to have the weights in bfloat16 too"
        )


class BF16True(Policy):
    """``bf16-true``: every floating-point parameter, buffer and input is bfloat16.

    Half the memory, and no float32 copy of the weights: an update smaller than 1/512 of a weight rounds
    to none, since nothing here rounds stochastically. `keep_float32` is for what cannot bear that.
    """

    name = "bf16-true"
    weights = "bfloat16"
    casts_inputs = True

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context in which tensors made without a dtype are bfloat16.

        A float32 one would turn what a module computes with it into float32 on XLA, without a word.
        """
        return self.init()

    def describe(self) -> str:
        """Say what bfloat16 weights cost."""
        return (
            "bf16-true keeps the weights and the optimizer's state in bfloat16: an update smaller than 1/512 "
            "of a weight is lost; bf16-mixed has float32 weights"
        )
