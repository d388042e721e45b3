"""LU decompositions, which TorchTPU leaves to libtpu. Importing this module imports jax.

``inv``, ``solve`` and ``det`` need them. The decomposition consists of simple instructions, because XLA's CPU
client as a plugin has no LAPACK to call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from polyxla_bridge.engine.expansions import inlining
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction

_LU = "LuDecomposition"
"""Target of the custom call: it returns both factors in one matrix, the row that each row was exchanged with,
and the permutation of the rows. Source: the TPU's lowering rule in ``jax._src.lax.linalg``."""


def choose(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
    """Return the function that computes an LU decomposition; None for any other instruction."""
    is_lu = instruction.opcode == "custom-call" and instruction.custom_call_target == _LU
    return _decomposed if is_lu else None


def _decomposed(matrices: jax.Array) -> tuple[jax.Array, ...]:
    """Decompose each matrix of the last two dimensions."""
    decompose: Any = _decomposed_one
    for _ in matrices.shape[:-2]:
        decompose = jax.vmap(decompose)
    found: tuple[jax.Array, ...] = decompose(matrices)
    return found


def _decomposed_one(matrix: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, columns = (jnp.arange(length, dtype="int32") for length in matrix.shape)
    count = min(matrix.shape)

    def eliminate(step: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        whole, exchanged, order = state
        is_below = rows > step
        # No absolute value is below 0, so the -1 of an earlier row is never the largest.
        pivot = jnp.argmax(jnp.where(rows >= step, jnp.abs(whole[:, step]), -1)).astype("int32")
        pair, swapped = jnp.stack([step, pivot]), jnp.stack([pivot, step])
        whole, order = whole.at[pair].set(whole[swapped]), order.at[pair].set(order[swapped])
        divisor = whole[step, step]
        # The largest element is 0 only if all elements below are 0, in a singular matrix: nothing is left to
        # eliminate, and a division would give NaN.
        factors = jnp.where(is_below & (divisor != 0), whole[:, step] / divisor, whole[:, step])
        whole = whole.at[:, step].set(factors)
        is_left = is_below[:, None] & (columns > step)[None, :]
        whole = jnp.where(is_left, whole - factors[:, None] * whole[step, :][None, :], whole)
        return whole, exchanged.at[step].set(pivot), order

    # The bounds are int32 like the pivots, because Python's numbers would make an int64 counter.
    start = (matrix, jnp.zeros(count, "int32"), rows)
    found: tuple[jax.Array, jax.Array, jax.Array] = lax.fori_loop(
        jnp.int32(0), jnp.int32(count), eliminate, start
    )
    return found
