"""The answer to a request, which arrives in chunks."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from polyxla_bridge.errors import PjrtError
from polyxla_xrt.proto import worker_pb2 as pb


class PendingAnswer:
    """An answer that has not arrived completely. Only the reader thread calls its methods.

    Args:
        size: the size of the answer in bytes; 0 if unknown.

    Attributes:
        done: gets the whole answer, or the error.
    """

    def __init__(self, size: int) -> None:
        self.done: Future[memoryview] = Future()
        # Allocated once and not filled with zeros.
        self._data = memoryview(np.empty(size, np.uint8).data)
        self._filled = 0

    def add(self, part: pb.Part, data: memoryview | None = None) -> bool:
        """Add a chunk; return whether it was the last.

        Args:
            part: the chunk.
            data: its data; None if `part` has it.
        """
        if part.HasField("failure"):
            self.done.set_exception(PjrtError(part.failure.code, part.failure.message))
            return True
        if data is None:
            data = memoryview(part.data)
        if part.ends and not self._filled:
            # The whole answer is one chunk: no copy.
            self.done.set_result(data)
            return True
        end = self._filled + len(data)
        if end > len(self._data):
            # The size was not known: grow.
            grown = bytearray(max(end, 2 * len(data)))
            grown[: self._filled] = self._data[: self._filled]
            self._data = memoryview(grown)
        self._data[self._filled : end] = data
        self._filled = end
        if part.ends:
            self.done.set_result(self._data[:end])
        return part.ends

    def fail(self, error: PjrtError) -> None:
        """Set the error, unless the answer is complete."""
        if not self.done.done():
            self.done.set_exception(error)
