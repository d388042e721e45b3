"""What waits to be sent over one stream, in order; what has gathered meanwhile is sent together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

LIMIT_BYTES = 64 << 20
"""How many bytes may wait; whoever has more waits, too."""
_TOGETHER_BYTES = 1 << 20
_EACH_BYTES = 64
"""What a message without data takes, roughly."""


class Outbox:
    """A queue for the one thread that sends. Any thread may put.

    Args:
        last: called when everything else has been taken; returns what more to send, or None. What may come
            late, like frees, waits for it. It must not put.
        linger_s: how long what `last` may have waits for company, in seconds.
    """

    def __init__(self, last: Callable[[], Any | None] = lambda: None, linger_s: float = 0.05) -> None:
        self._items: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._is_closed = self._is_cut = False
        self._last = last
        self._linger_s = linger_s

    def put(self, item: Any, size: int = 0, *, may_wait: bool = True) -> bool:
        """Queue a message; waits while too much is queued. Return whether it will be sent.

        Args:
            item: the message.
            size: how many bytes of data it has.
            may_wait: else it is queued whatever waits already.
        """
        size += _EACH_BYTES
        with self._changed:
            # One that is larger than the limit goes alone.
            while may_wait and self._bytes and self._bytes + size > LIMIT_BYTES and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return False
            self._items.append((item, size))
            self._bytes += size
            self._changed.notify_all()
            return True

    def take(self) -> list[Any] | None:
        """Wait for messages and return those that travel together; None when there will be no more."""
        with self._changed:
            deadline = time.monotonic() + self._linger_s
            while not self._items and not self._is_closed:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    # Only behind everything: what was queued just now may need what is freed.
                    if not self._items and (last := self._last()) is not None:
                        return [last]
                    deadline = time.monotonic() + self._linger_s
            if self._is_cut or not self._items:
                return None
            together: list[Any] = []
            size = 0
            while self._items and (not together or size + self._items[0][1] <= _TOGETHER_BYTES):
                item, item_size = self._items.popleft()
                together.append(item)
                size += item_size
            self._bytes -= size
            self._changed.notify_all()
            if not self._items and (last := self._last()) is not None:
                together.append(last)
        return together

    def close(self) -> None:
        """Let what is queued be taken, and nothing more be put."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def cut(self) -> None:
        """Drop what is queued: nobody will take it."""
        with self._changed:
            self._is_closed = self._is_cut = True
            self._items.clear()
            self._bytes = 0
            self._changed.notify_all()
