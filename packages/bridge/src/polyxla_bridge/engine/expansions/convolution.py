"""Convolutions as calls of the C library, which has torch's. Importing this module imports jax."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np
from jax import lax, numpy

from polyxla_bridge.engine.expansions import inlining, torch_library
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.cache import cpu
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction

TARGET = "polyxla_convolution"
"""The C library's function."""
LEAST_WORK = 1 << 22
"""Multiplications below which XLA's convolution is as fast. This, and what `_Convolution.is_faster` says, was
measured with random sizes on 2 cores (``nox -s bench -- convolutions``)."""
_LEAST_FEATURES = 8
"""Features of an image below which XLA's gradient of it is as fast, if the stride is not 1."""
_DTYPES = frozenset(("float32", "bfloat16", "float16"))
_MOST_DIMENSIONS = 3


@cache
def _has_avx512() -> bool:
    return "avx512f" in cpu().split()


class _Kind(enum.IntEnum):
    """What a convolution computes: see `Kind` in native/convolutions.c."""

    FORWARD = 0
    IMAGE_GRADIENT = 1
    KERNEL_GRADIENT = 2


@dataclass(frozen=True)
class _Convolution:
    """A convolution of torch that computes what one of XLA does, from XLA's operands.

    The operands are two of the three arrays, in this order, and the third is the result.

    Attributes:
        kind: which of torch's computations it is.
        image: dimensions of the image: [batch, input feature, ...].
        kernel: dimensions of the kernel: [output feature, input feature, ...], without groups.
        result: dimensions of the convolution's result, or of its gradient: [batch, output feature, ...].
        stride: of torch's convolution, as are the next three.
        padding: on both sides.
        dilation: of the kernel.
        groups: of features.
        order: for each dimension of the kernel, that of XLA's kernel.
        is_reversed: whether XLA's kernel is torch's backwards.
        dtype: of what is computed.
    """

    kind: _Kind
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    result: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    order: tuple[int, ...]
    is_reversed: bool
    dtype: str

    @property
    def is_possible(self) -> bool:
        """Whether a convolution of torch has arrays of these sizes: it pads both sides alike."""
        sizes = (
            (size + 2 * padding - dilation * (length - 1) - 1) // stride + 1
            for size, length, stride, padding, dilation in zip(
                self.image[2:], self.kernel[2:], self.stride, self.padding, self.dilation, strict=True
            )
        )
        return tuple(sizes) == self.result[2:] and min(self.padding) >= 0

    @property
    def is_faster(self) -> bool:
        """Whether torch computes it faster than XLA."""
        if self.groups > 1:
            return True
        features = self.image[1]
        is_small = set(self.kernel[2:]) == {1} or features < _LEAST_FEATURES
        if self.kind is _Kind.IMAGE_GRADIENT and set(self.stride) != {1} and is_small:
            return False
        if self.kind is _Kind.KERNEL_GRADIENT and features == 1 and not _has_avx512():
            return False
        # Each number of the kernel meets each place of the result.
        batch, _, *places = self.result
        return math.prod(self.kernel) * batch * math.prod(places) >= LEAST_WORK

    def __call__(self, first: jax.Array, second: jax.Array) -> jax.Array:
        """Return XLA's result."""
        arrays = (self.result, self.image, self.kernel)
        if self.kind is not _Kind.KERNEL_GRADIENT:
            second = self._as_in_torch(second)
        call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(arrays[self.kind], numpy.float32))  # type: ignore[no-untyped-call]
        array: jax.Array = call(
            first.astype(numpy.float32),
            second.astype(numpy.float32),
            kind=np.int64(self.kind),
            stride=np.array(self.stride, np.int64),
            padding=np.array(self.padding, np.int64),
            dilation=np.array(self.dilation, np.int64),
            groups=np.int64(self.groups),
        )
        if self.kind is _Kind.KERNEL_GRADIENT:
            array = lax.transpose(array, [self.order.index(i) for i in range(array.ndim)])
        return array.astype(self.dtype)

    def _as_in_torch(self, kernel: jax.Array) -> jax.Array:
        kernel = lax.transpose(kernel, self.order)
        if self.is_reversed:
            kernel = lax.rev(kernel, range(2, kernel.ndim))
        if self.kind is _Kind.FORWARD or self.groups == 1:
            return kernel
        # For an image's gradient, XLA has the groups in the input features, torch in the output features.
        outputs, inputs, *lengths = kernel.shape
        kernel = kernel.reshape(outputs, self.groups, inputs // self.groups, *lengths)
        return numpy.swapaxes(kernel, 0, 1).reshape(outputs * self.groups, inputs // self.groups, *lengths)


def choose(instruction: Instruction, program: inlining.Program) -> inlining.Function | None:
    """Return torch's function for a convolution; None for another instruction, or if XLA's is to stay.

    Whether torch's is taken follows from the sizes and the processor, and not from a measurement: a program's
    numbers would change from run to run.
    """
    if instruction.opcode != "convolution":
        return None
    found = _in_torch(instruction, *(program.instructions[number] for number in instruction.operand_ids))
    is_better = found is not None and found.is_possible and found.is_faster
    return found if is_better and torch_library.is_open() else None


def _in_torch(instruction: Instruction, first: Instruction, second: Instruction) -> _Convolution | None:
    """Return torch's form of a convolution with these operands; None if it has none.

    It may be impossible.
    """
    (dtype, dims), (of_first, image), (of_second, other) = (
        hlo.array_type(array.shape) for array in (instruction, first, second)
    )
    windows = instruction.window.dimensions
    is_known = {dtype, of_first, of_second} <= _DTYPES and 1 <= len(windows) <= _MOST_DIMENSIONS
    reversals = {window.window_reversal for window in windows}
    if not is_known or 0 in (*dims, *image, *other) or len(reversals) > 1:
        return None
    (is_backwards,) = reversals
    stride = tuple(window.stride for window in windows)
    low = tuple(window.padding_low for window in windows)
    dilation = tuple(window.window_dilation for window in windows)
    spread = tuple(window.base_dilation for window in windows)
    ones = (1,) * len(windows)
    groups, batch_groups = instruction.feature_group_count, instruction.batch_group_count
    inputs, kernel, outputs = _roles(instruction)
    images = tuple(range(len(dims)))
    if inputs == outputs == images and batch_groups == 1:
        # torch_xla and jax reverse the kernel before the gradient of an image, TorchTPU within it.
        if spread == ones and not is_backwards and second.opcode != "reverse":
            sizes = tuple(other[dimension] for dimension in kernel)
            return _Convolution(
                _Kind.FORWARD, image, sizes, dims, stride, low, dilation, groups, kernel, False, dtype
            )
        if stride != ones:
            return None
        order = (kernel[1], kernel[0], *kernel[2:])
        sizes = tuple(other[dimension] for dimension in order)
        padding = tuple(d * (size - 1) - p for d, size, p in zip(dilation, sizes[2:], low, strict=True))
        return _Convolution(
            _Kind.IMAGE_GRADIENT,
            *(dims, sizes, image, spread, padding, dilation, groups, order, not is_backwards, dtype),
        )
    # XLA has the batch in the features.
    if inputs == kernel == (1, 0, *images[2:]) and spread == ones and groups == 1 and not is_backwards:
        order = (outputs[1], outputs[0], *outputs[2:])
        sizes = tuple(dims[dimension] for dimension in order)
        return _Convolution(
            _Kind.KERNEL_GRADIENT,
            *(image, sizes, other, dilation, low, stride, batch_groups, order, False, dtype),
        )
    return None


def _roles(instruction: Instruction) -> list[tuple[int, ...]]:
    """Return the dimensions of the image, the kernel and the result of a convolution.

    They are in the order batch, feature, ..., and for the kernel output feature, input feature, ....
    """
    has = instruction.convolution_dimension_numbers
    return [
        (has.input_batch_dimension, has.input_feature_dimension, *has.input_spatial_dimensions),
        (
            *(has.kernel_output_feature_dimension, has.kernel_input_feature_dimension),
            *has.kernel_spatial_dimensions,
        ),
        (has.output_batch_dimension, has.output_feature_dimension, *has.output_spatial_dimensions),
    ]
