"""Programs for a TPU, on devices whose compiler lacks its instructions. Importing this imports jax.

libtpu itself computes LU decompositions, which ``inv``, ``solve`` and ``det`` of TorchTPU need, and resizes
images for torch_xla. Here the decomposition consists of simple instructions, because XLA's CPU client as a
plugin has no LAPACK to call, and the formulas of the resizing are those of torch's ``interpolate``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyxla_bridge.engine.expansions import inlining, scan
from polyxla_bridge.programs import hlo, kernels
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module


def _program_of_kernel(instruction: Instruction, _: inlining.Program) -> Module | None:
    return hlo.parse_module(kernels.program_of(instruction)) if kernels.has_program(instruction) else None


_LU = "LuDecomposition"
"""Target of the custom call: it returns both factors in one matrix, the row that each row was exchanged with,
and the permutation of the rows. Source: the TPU's lowering rule in ``jax._src.lax.linalg``."""


def _decomposition(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
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


_SPATIAL = (1, 2)
"""Dimensions that are resized, between those of the batch and of the channels."""


def _resizing(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
    """Return the function that computes a resizing or its gradient; None for any other instruction.

    Source: torch_xla/csrc/resize_ops.cpp, which writes the custom calls. Their configuration is two digits:
    whether corners are aligned, and whether the centers of pixels lie at halves.
    """
    target = instruction.custom_call_target
    if instruction.opcode != "custom-call" or target.removesuffix("Grad") not in _RESIZINGS:
        return None
    is_aligned, is_half = (digit == "1" for digit in instruction.backend_config.decode().strip('"'))
    along = partial(_RESIZINGS[target.removesuffix("Grad")], is_aligned=is_aligned, is_half=is_half)
    if target.endswith("Grad"):
        return partial(_gradient, along=along, dims=tuple(instruction.shape.dimensions))
    return partial(_resized, along=along, dims=tuple(instruction.shape.dimensions))


def _resized(image: jax.Array, *, along: inlining.Function, dims: Sequence[int]) -> jax.Array:
    for axis in _SPATIAL:
        image = along(image, axis, dims[axis])
    return image


def _gradient(gradient: jax.Array, *, along: inlining.Function, dims: Sequence[int]) -> jax.Array:
    # The result of a resizing is linear in the image, so the gradient is the transposed function.
    image = jax.ShapeDtypeStruct(dims, gradient.dtype)  # type: ignore[no-untyped-call]
    (result,) = jax.linear_transpose(partial(_resized, along=along, dims=gradient.shape), image)(gradient)
    whole: jax.Array = result
    return whole


def _bilinear(image: jax.Array, axis: int, size: int, *, is_aligned: bool, is_half: bool) -> jax.Array:
    length = image.shape[axis]
    # The sizes are known now, so numpy computes the places, and the program has them as constants. torch
    # moves places before the first pixel to that pixel.
    place = np.maximum(_places(length, size, image.dtype, is_aligned=is_aligned, is_half=is_half), 0)
    low = np.minimum(place.astype(np.int64), length - 1)
    high = np.minimum(low + 1, length - 1)
    shape = [size if dimension == axis else 1 for dimension in range(image.ndim)]
    share = (place - low).reshape(shape)
    of_low, of_high = (jnp.asarray(weight, image.dtype) for weight in (1 - share, share))
    return jnp.take(image, low, axis) * of_low + jnp.take(image, high, axis) * of_high


def _nearest(image: jax.Array, axis: int, size: int, *, is_aligned: bool, is_half: bool) -> jax.Array:
    length = image.shape[axis]
    place = _places(length, size, image.dtype, is_aligned=is_aligned, is_half=False)
    if is_half:
        place = place + np.asarray(length / size / 2, place.dtype)
    found = np.round(place) if is_aligned else np.floor(place)
    return jnp.take(image, np.minimum(found.astype(np.int64), length - 1), axis)


def _places(length: int, size: int, dtype: Any, *, is_aligned: bool, is_half: bool) -> Any:
    """Return where each element of the result lies in the image, which torch computes in floats."""
    kind: Any = np.float64 if dtype == np.float64 else np.float32
    index = np.arange(size, dtype=kind)
    if is_aligned and size > 1:
        return index * kind((length - 1) / kind(size - 1))
    scale = kind(kind(length) / kind(size))
    return (index + kind(0.5)) * scale - kind(0.5) if is_half else index * scale


_RESIZINGS: Mapping[str, inlining.Function] = {"ResizeBilinear": _bilinear, "ResizeNearest": _nearest}
"""Functions that resize along one dimension, by the target of the custom call."""


CHOICES: tuple[inlining.Choice, ...] = (
    scan.choose,
    _resizing,
    _decomposition,
    _program_of_kernel,
)
"""Expand the instructions and the custom calls that only libtpu compiles."""


def expanded(module: bytes) -> bytes:
    """Expand what only libtpu compiles, in a serialised HloModuleProto.

    Raises:
        PjrtError: a step of a scan has an instruction that is not known.
    """
    return inlining.replace(module, *CHOICES)
