"""Expansion of batch norms in partitioned programs. Importing this module imports jax.

XLA's partitioner cannot split the batch norm instructions: it gathers the whole batch on every device, and
each device then computes everything. It can split the instructions that compute a batch norm. torch_xla
writes layer norm as a batch norm, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module

Normalization = Callable[..., Any]


def expand(module: bytes) -> bytes:
    """Replace each batch norm by the instructions that compute it.

    Args:
        module: a serialised HloModuleProto.

    Returns:
        The program without batch norms; `module` itself if it has none.
    """
    parsed = hlo.parse_module(module)
    every = [one for computation in parsed.computations for one in computation.instructions]
    if not any(one.opcode in _NORMALIZATIONS for one in every):
        return module
    shapes = {one.id: one.shape for one in every}
    imported = _Imported(parsed)
    for computation in list(parsed.computations):
        instructions = list(computation.instructions)
        del computation.instructions[:]
        for one in instructions:
            if one.opcode in _NORMALIZATIONS:
                operands = [hlo.array_type(shapes[id_]) for id_ in one.operand_ids]
                function = partial(_NORMALIZATIONS[one.opcode], axis=one.feature_index, epsilon=one.epsilon)
                computation.instructions.extend(imported.inlined(_lowered(function, operands), one))
            else:
                computation.instructions.append(one)
    imported.add_computations()
    return parsed.SerializeToString()


def _training(
    x: jax.Array, scale: jax.Array, offset: jax.Array, *, axis: int, epsilon: float
) -> tuple[jax.Array, ...]:
    """Return the normalised array, and the mean and the variance of each feature."""
    others = _all_but(axis, x)
    # As XLA's own expansion, which single devices run: both sums need only one pass, and one all-reduce.
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
    count = x.size // scale.size
    through_mean = jnp.expand_dims(of_offset / count, others)
    through_variance = normalized * jnp.expand_dims(of_scale / count, others)
    of_x = jnp.expand_dims(scale * deviation, others) * (gradient - through_mean - through_variance)
    return of_x, of_scale, of_offset


_NORMALIZATIONS: dict[str, Normalization] = {
    "batch-norm-training": _training,
    "batch-norm-inference": _inference,
    "batch-norm-grad": _gradient,
}
"""What computes each instruction. Source: BatchNormTraining, BatchNormInference and BatchNormGrad in
https://openxla.org/xla/operation_semantics."""


def _all_but(axis: int, x: jax.Array) -> tuple[int, ...]:
    return tuple(one for one in range(x.ndim) if one != axis)


def _lowered(function: Normalization, operands: list[tuple[str, tuple[int, ...]]]) -> Module:
    """Return a function of arrays as a program."""
    arrays = [jax.ShapeDtypeStruct(dims, dtype) for dtype, dims in operands]  # type: ignore[no-untyped-call]
    # An unused argument would be left out of the program.
    lowered = jax.jit(function, keep_unused=True).lower(*arrays)
    computation: Any = lowered.compiler_ir("hlo")
    return hlo.parse_module(computation.as_serialized_hlo_module_proto())


class _Imported:
    """Instructions of other programs, for a module.

    Args:
        into: the module.
    """

    def __init__(self, into: Module) -> None:
        self._into = into
        every = [one for computation in into.computations for one in computation.instructions]
        self._numbers = itertools.count(max(one.id for one in every) + 1)
        self._computation_numbers = itertools.count(max(one.id for one in into.computations) + 1)
        self._called: list[Computation] = []

    def inlined(self, module: Module, original: Instruction) -> list[Instruction]:
        """Return the entry's instructions, which take the place of one that has the same operands."""
        computations = {one.id: next(self._computation_numbers) for one in module.computations}
        (entry,) = (one for one in module.computations if one.id == module.entry_computation_id)
        for computation in module.computations:
            if computation is not entry:
                computation.id = computations[computation.id]
                computation.name = f"{computation.name}.{computation.id}"
                numbers = {one.id: next(self._numbers) for one in computation.instructions}
                computation.root_id = numbers[computation.root_id]
                for one in computation.instructions:
                    _renumber(one, numbers, computations)
                self._called.append(computation)
        given = {
            one.id: original.operand_ids[one.parameter_number]
            for one in entry.instructions
            if one.opcode == "parameter"
        }
        body = [one for one in entry.instructions if one.id not in given]
        numbers = given | {one.id: next(self._numbers) for one in body} | {entry.root_id: original.id}
        for one in body:
            _renumber(one, numbers, computations)
            one.metadata = original.metadata
        if original.HasField("sharding"):
            (root,) = (one for one in body if one.id == original.id)
            root.sharding.CopyFrom(original.sharding)
        return body

    def add_computations(self) -> None:
        """Add what the inlined instructions call; the module's entry stays its last computation."""
        before = list(self._into.computations)
        del self._into.computations[:]
        self._into.computations.extend([*self._called, *before])


def _renumber(one: Instruction, numbers: dict[int, int], computations: dict[int, int]) -> None:
    one.id = numbers[one.id]
    one.name = f"{one.name}.{one.id}"
    one.operand_ids[:] = [numbers[id_] for id_ in one.operand_ids]
    one.called_computation_ids[:] = [computations[id_] for id_ in one.called_computation_ids]
