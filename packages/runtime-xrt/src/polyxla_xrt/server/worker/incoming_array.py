"""An array whose chunks are arriving from a client."""

from __future__ import annotations

import numpy as np

from polyxla_bridge.abi import DTYPES, width
from polyxla_bridge.engine.engine import EngineDevice
from polyxla_bridge.programs.executable import ArrayType
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol.worker import array_bytes

MAX_DIMENSIONS = 64
"""Maximum number of dimensions of an array: NumPy's limit."""
ALIGNMENT = 64
"""Alignment of the arrays' memory in bytes, with which XLA's CPU client uses it without a copy."""
_MAX_ARRAY_BYTES = 1 << 63
_MAX_NAME_CHARS = 40


class MisuseError(Exception):
    """The client violates the protocol; its session ends."""


class IncomingArray:
    """Assembles an array in the memory that the engine will use.

    The first valid chunk allocates the memory of the whole array, so the budget must have room for it.

    Args:
        array: its number.
        type_: its type.
        device: its device.
        problem: why the array is refused; its chunks are dropped, since the client has sent them already.

    Attributes:
        size: the array's size in bytes.
        data: the bytes that have arrived; empty before the first chunk, and if there is a problem.
    """

    def __init__(self, array: int, type_: ArrayType, device: EngineDevice, problem: str | None) -> None:
        self.array = array
        self.type = type_
        self.device = device
        self.problem = problem
        self.size = size_of(type_)
        self.data = memoryview(b"")
        self._filled = 0

    def add(self, chunk: pb.Upload, data: bytes | memoryview) -> None:
        """Add a chunk's data.

        Raises:
            MisuseError: the chunk belongs to another array, or there is more or less data than announced.
        """
        if chunk.array != self.array:
            raise MisuseError(f"a chunk of array {chunk.array} came amid array {self.array}")
        end = self._filled + len(data)
        if end > self.size or (chunk.ends and end < self.size):
            raise MisuseError(f"array {chunk.array} has {end} bytes, not {self.size}")
        if not self.problem:
            if not self._filled:
                self.data = _aligned(self.size)
            # numpy releases the GIL while it copies, so that other threads can run.
            np.frombuffer(self.data, np.uint8)[self._filled : end] = np.frombuffer(data, np.uint8)
        self._filled = end


def array_type(message: pb.ArrayType) -> ArrayType:
    """Return the type of an array as a client announces it.

    Raises:
        MisuseError: it is invalid.
    """
    if message.dtype not in DTYPES or width(message.dtype) == 0:
        raise MisuseError(f"{message.dtype[:_MAX_NAME_CHARS]!r} is not a dtype of arrays")
    if len(message.dims) > MAX_DIMENSIONS:
        raise MisuseError(f"an array has more than {MAX_DIMENSIONS} dimensions: {len(message.dims)}")
    if any(size < 0 for size in message.dims):
        raise MisuseError(f"an array cannot have the dimensions {list(message.dims)}")
    type_ = ArrayType(message.dtype, tuple(message.dims))
    if size_of(type_) >= _MAX_ARRAY_BYTES:
        raise MisuseError(f"an array of {list(message.dims)} is too large")
    return type_


def size_of(type_: ArrayType) -> int:
    """Return the size of an array in bytes."""
    return array_bytes(width(type_.dtype), type_.dims)


def _aligned(size: int) -> memoryview:
    # `np.empty` does not fill the memory with zeros, which the data will overwrite.
    memory = np.empty(size + ALIGNMENT - 1, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : start + size].data
