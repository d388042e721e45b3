"""The answer to a request, which arrives in chunks."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_xrt.proto import worker_pb2 as pb


class PendingAnswer:
    """An answer that has not arrived completely. Only the reader thread calls its methods.

    Args:
        into: memory of the answer's size that gets it; None if the size is unknown.

    Attributes:
        done: gets the whole answer, or the error.
    """

    def __init__(self, into: memoryview | None = None) -> None:
        self.done: Future[memoryview] = Future()
        self._into = into
        self._parts: list[memoryview] = []
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
        self._keep(memoryview(part.data) if data is None else data)
        if part.ends:
            self._complete()
        return part.ends

    def _keep(self, data: memoryview) -> None:
        start, self._filled = self._filled, self._filled + len(data)
        if self._into is None:
            self._parts.append(data)
        elif self._filled <= len(self._into):
            # Excess data is dropped here; `_complete` compares the sizes and reports it.
            # numpy releases the GIL while it copies, so that other threads can run.
            np.frombuffer(self._into, np.uint8)[start : self._filled] = np.frombuffer(data, np.uint8)

    def _complete(self) -> None:
        if self._into is None:
            # An answer of one chunk is not copied.
            content = self._parts[0] if len(self._parts) == 1 else memoryview(b"".join(self._parts))
            self.done.set_result(content)
        elif self._filled == len(self._into):
            self.done.set_result(self._into)
        else:
            self.done.set_exception(
                PjrtError(
                    Code.INTERNAL,
                    f"the worker sent {self._filled} bytes of an array of {len(self._into)} bytes",
                )
            )

    def restart(self) -> None:
        """Forget the chunks that came: another session sends the answer from its beginning."""
        self._parts.clear()
        self._filled = 0

    def fail(self, error: PjrtError) -> None:
        """Set the error, unless the answer is complete."""
        if not self.done.done():
            self.done.set_exception(error)
