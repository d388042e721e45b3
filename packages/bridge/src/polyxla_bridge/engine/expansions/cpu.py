"""Programs for XLA's CPU compiler, in either engine. Importing this module imports jax."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
from jax import lax, numpy

from polyxla_bridge.engine.expansions import batch_norm, convolution, inlining, max_pool, tpu
from polyxla_bridge.programs import hlo, kernels, rewrite
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction

_NARROW = {"bfloat16", "float16"}


def choose_narrow_sum(
    instruction: Instruction, computations: Mapping[int, Computation]
) -> inlining.Function | None:
    """Return the function that computes a sum of bfloat16 or float16 numbers; None for another instruction.

    XLA:CPU keeps the sum in the numbers' own type, and rounds it after each of them. PyTorch's CPU and GPUs
    add in float32, and round once.
    """
    if instruction.opcode != "reduce" or len(instruction.operand_ids) != 2:
        return None
    (called,) = instruction.called_computation_ids
    opcodes = [step.opcode for step in computations[called].instructions]
    if opcodes != ["parameter", "parameter", "add"] or hlo.array_type(instruction.shape)[0] not in _NARROW:
        return None
    return partial(_sum, tuple(instruction.dimensions))


def _sum(dimensions: tuple[int, ...], numbers: jax.Array, initial: jax.Array) -> jax.Array:
    wide = lax.reduce(numbers.astype(numpy.float32), initial.astype(numpy.float32), lax.add, dimensions)
    narrow: jax.Array = wide.astype(numbers.dtype)
    return narrow


def expanded(
    module: bytes, *, is_partitioned: bool, calls_library: bool = False, calls_torch: bool = False
) -> bytes:
    """Expand what XLA's CPU compiler refuses, or computes slowly, in a serialised HloModuleProto.

    Args:
        module: the program.
        is_partitioned: whether several devices compute it together.
        calls_library: whether the program may call the C library.
        calls_torch: whether it may call torch's convolutions by the library.

    Raises:
        PjrtError: a step of a scan has an instruction that is not known.
    """
    choices = [*tpu.CHOICES, choose_narrow_sum]
    if is_partitioned:
        # The partitioner cannot split a call.
        choices.append(batch_norm.choose)
    else:
        choices.append(partial(max_pool.choose, calls_library=calls_library))
        choices.extend([convolution.chooser(module)] if calls_torch else [])
    return inlining.replace(module, *choices)


def rewritten(module: bytes, partitions: int, replicas: int) -> bytes:
    """Rewrite a serialised HloModuleProto as for jaxlib's CPU client.

    Args:
        module: the program.
        partitions: number of devices that compute one replica together.
        replicas: number of replicas.

    Raises:
        PjrtError: the program has kernels for TPU cores.
    """
    kernels.check(module)
    simple = expanded(module, is_partitioned=partitions > 1)
    return hlo.with_layouts(rewrite.for_jaxlib(simple, replicas, is_partitioned=partitions > 1))
