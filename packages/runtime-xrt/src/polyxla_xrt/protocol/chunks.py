"""Cutting data into messages: whole, a large payload would be copied a dozen times on its way."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK_BYTES = 1 << 20
"""Largest chunk of an array, a program or a payload in one message."""


def chunks(data: bytes | memoryview) -> Iterator[tuple[memoryview, bool]]:
    """Yield the chunks of `data`, each with whether it is the last. Empty data yields one empty chunk."""
    view = memoryview(data)
    last = max(len(view) - 1, 0) // CHUNK_BYTES
    for number in range(last + 1):
        yield view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES], number == last
