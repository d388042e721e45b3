"""Expansion of batch norms in partitioned programs. Importing this module imports jax.

XLA's partitioner cannot split the batch norm instructions: it gathers the whole batch on every device, and
each device then computes everything. It can split the instructions that compute a batch norm. torch_xla
also writes layer norm as a batch norm.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from polyxla_bridge.engine.expansions import inlining
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction


def choose(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
    """Return the function that computes a batch norm; None for any other instruction."""
    if instruction.opcode not in _NORMALIZATIONS:
        return None
    return partial(
        _NORMALIZATIONS[instruction.opcode], axis=instruction.feature_index, epsilon=instruction.epsilon
    )


def _training(
    x: jax.Array, scale: jax.Array, offset: jax.Array, *, axis: int, epsilon: float
) -> tuple[jax.Array, ...]:
    """Return the normalised array, and the mean and the variance of each feature."""
    others = _all_but(axis, x)
    # Both sums need one pass and one all-reduce. XLA's own expansion for single devices does the same.
    mean = jnp.mean(x, others)
    variance = jnp.mean(x * x, others) - mean * mean
    return _inference(x, scale, offset, mean, variance, axis=axis, epsilon=epsilon), mean, variance


def _inference(
    x: jax.Array,
    scale: jax.Array,
    offset: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    *,
    axis: int,
    epsilon: float,
) -> jax.Array:
    others = _all_but(axis, x)
    centered = x - jnp.expand_dims(mean, others)
    factor = scale * jax.lax.rsqrt(variance + epsilon)
    return centered * jnp.expand_dims(factor, others) + jnp.expand_dims(offset, others)


def _gradient(
    x: jax.Array,
    scale: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gradient: jax.Array,
    *,
    axis: int,
    epsilon: float,
) -> tuple[jax.Array, ...]:
    """Return the gradients of the array, of the scale and of the offset."""
    others = _all_but(axis, x)
    deviation = jax.lax.rsqrt(variance + epsilon)
    normalized = (x - jnp.expand_dims(mean, others)) * jnp.expand_dims(deviation, others)
    of_scale, of_offset = jnp.sum(gradient * normalized, others), jnp.sum(gradient, others)
    # The mean and the variance depend on each element, so the gradient has a term for both.
    count = x.size // scale.size
    through_mean = jnp.expand_dims(of_offset / count, others)
    through_variance = normalized * jnp.expand_dims(of_scale / count, others)
    of_x = jnp.expand_dims(scale * deviation, others) * (gradient - through_mean - through_variance)
    return of_x, of_scale, of_offset


_NORMALIZATIONS: dict[str, inlining.Function] = {
    "batch-norm-training": _training,
    "batch-norm-inference": _inference,
    "batch-norm-grad": _gradient,
}
"""The function that computes each instruction. Source: BatchNormTraining, BatchNormInference, BatchNormGrad
in https://openxla.org/xla/operation_semantics."""


def _all_but(axis: int, x: jax.Array) -> tuple[int, ...]:
    return tuple(dimension for dimension in range(x.ndim) if dimension != axis)
