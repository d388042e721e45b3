"""Resizing of images, which torch_xla leaves to libtpu's custom calls. Importing this module imports jax.

The formulas are those of torch's ``interpolate``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyxla_bridge.engine.expansions import inlining
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction

_SPATIAL = (1, 2)
"""Dimensions that are resized, between those of the batch and of the channels."""


def choose(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
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
