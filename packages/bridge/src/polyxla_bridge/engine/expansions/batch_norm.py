"""Batch norms. torch_xla also writes layer norm as one. Importing this module imports jax.

XLA's partitioner cannot split the batch norm instructions: it gathers the whole batch on every device, and
each device then computes everything. It can split the instructions that compute a batch norm.

On one device, XLA:CPU adds the numbers of a feature one by one, and on one thread. The C library adds
vectors, and divides the features among threads.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from polyxla_bridge.engine.expansions import inlining
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction

TARGET, GRADIENT_TARGET = "polyxla_batch_norm", "polyxla_batch_norm_gradient"
"""The C library's functions."""
_LEAST_SIZE, _LEAST_NUMBERS, _LEAST_PLACES = 1 << 13, 256, 8
"""Numbers in an array, those of a feature, and those of a feature that are adjacent, below which XLA's batch
norms are as fast, and its sums of features."""


def choose(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
    """Return the function that computes a batch norm; None for any other instruction."""
    if instruction.opcode not in _NORMALIZATIONS:
        return None
    function = partial(
        _NORMALIZATIONS[instruction.opcode], axis=instruction.feature_index, epsilon=instruction.epsilon
    )
    return (
        partial(_in_float32, function, _result_dtypes(instruction)) if _is_narrow(instruction) else function
    )


def choose_exact(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
    """Return the function that computes a batch norm, where XLA's own is not exact; None for any other.

    XLA computes the variance as the mean of squares less the square of the mean, which has no correct digit
    where the mean is large. It computes batch norms of float16 in float16.
    """
    if instruction.opcode not in _NORMALIZATIONS:
        return None
    is_exact = instruction.opcode != "batch-norm-training" and not _is_narrow(instruction)
    return None if is_exact else choose(instruction, program)


def _is_narrow(instruction: Instruction) -> bool:
    return not hlo.NARROW.isdisjoint(_result_dtypes(instruction))


def _result_dtypes(instruction: Instruction) -> tuple[str, ...]:
    shapes = instruction.shape.tuple_shapes or [instruction.shape]
    return tuple(hlo.array_type(shape)[0] for shape in shapes)


def choose_in_library(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
    """Return what calls the C library for a batch norm; None if the instruction is to stay."""
    if instruction.opcode not in _IN_LIBRARY:
        return None
    types = [hlo.array_type(program.instructions[number].shape) for number in instruction.operand_ids]
    dims, axis = types[0][1], instruction.feature_index
    if not are_large(dims, axis, axis + 1) or {dtype for dtype, _ in types} != {"float32"}:
        return None
    return partial(_IN_LIBRARY[instruction.opcode], axis=axis, epsilon=instruction.epsilon)


def are_large(dims: tuple[int, ...], first: int, last: int) -> bool:
    """Return whether features are so large that the C library adds their numbers faster than XLA."""
    size, adjacent = math.prod(dims), math.prod(dims[last:])
    numbers = size // max(1, math.prod(dims[first:last]))
    return size >= _LEAST_SIZE and numbers >= _LEAST_NUMBERS and adjacent >= _LEAST_PLACES


def by_feature(x: jax.Array, first: int, last: int) -> jax.Array:
    """Return an array as [batch, feature, place]; the dimensions from `first` to `last` are the feature."""
    features = math.prod(x.shape[first:last])
    return x.reshape(math.prod(x.shape[:first]), features, math.prod(x.shape[last:]))


def _in_float32(
    function: inlining.Function, dtypes: tuple[str, ...], *arrays: jax.Array
) -> jax.Array | tuple[jax.Array, ...]:
    """Compute a batch norm of narrow numbers, and round each result once, as PyTorch's CPU and GPUs do."""
    results = function(*(array.astype(jnp.float32) for array in arrays))
    if isinstance(results, tuple):
        return tuple(map(jnp.astype, results, dtypes))
    return jnp.astype(results, dtypes[0])


def _training(
    x: jax.Array, scale: jax.Array, offset: jax.Array, *, axis: int, epsilon: float
) -> tuple[jax.Array, ...]:
    """Return the normalised array, and the mean and the variance of each feature."""
    others = _all_but(axis, x)
    mean = jnp.mean(x, others)
    variance = jnp.mean(jnp.square(x - jnp.expand_dims(mean, others)), others)
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


def _training_in_library(
    x: jax.Array, scale: jax.Array, offset: jax.Array, *, axis: int, epsilon: float
) -> tuple[jax.Array, ...]:
    array = by_feature(x, axis, axis + 1)
    call = jax.ffi.ffi_call(TARGET, (array, scale, scale))
    result, mean, variance = call(array, scale, offset, jnp.float32(epsilon))
    return result.reshape(x.shape), mean, variance


def _gradient_in_library(
    x: jax.Array,
    scale: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gradient: jax.Array,
    *,
    axis: int,
    epsilon: float,
) -> tuple[jax.Array, ...]:
    array, gradients = by_feature(x, axis, axis + 1), by_feature(gradient, axis, axis + 1)
    call = jax.ffi.ffi_call(GRADIENT_TARGET, (array, scale, scale))
    of_x, of_scale, of_offset = call(array, scale, mean, variance, gradients, jnp.float32(epsilon))
    return of_x.reshape(x.shape), of_scale, of_offset


_IN_LIBRARY: dict[str, inlining.Function] = {
    "batch-norm-training": _training_in_library,
    "batch-norm-grad": _gradient_in_library,
}


def _all_but(axis: int, x: jax.Array) -> tuple[int, ...]:
    return tuple(dimension for dimension in range(x.ndim) if dimension != axis)
