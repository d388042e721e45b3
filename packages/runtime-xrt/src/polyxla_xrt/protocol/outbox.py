"""A send queue for one stream: messages keep their order and are sent in batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

LIMIT_BYTES = 64 << 20
"""Limit of queued bytes; beyond it, `Outbox.put` blocks (backpressure)."""
_BATCH_BYTES = 1 << 20
_OVERHEAD_BYTES = 64
"""Approximate size of a message without data."""


class Outbox:
    """A queue with many producers and one consumer, the thread that sends.

    One condition guards all state. It is notified whenever room appears, a message arrives or the queue ends.

    Args:
        take_deferred: returns a message to send after everything that is queued, or None. It is called under
            the queue's lock and must not call `put`. The client's frees are sent this way.
        linger_s: interval of calls of `take_deferred` while the queue is empty, in seconds.
    """

    def __init__(
        self, take_deferred: Callable[[], Any | None] = lambda: None, linger_s: float = 0.05
    ) -> None:
        self._items: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._is_closed = self._is_cut = False
        self._take_deferred = take_deferred
        self._linger_s = linger_s

    def put(self, item: Any, size: int = 0, *, may_wait: bool = True) -> bool:
        """Queue a message, and block while the queue is full. Return False if the queue has ended.

        Args:
            item: the message.
            size: bytes of data in the message.
            may_wait: False queues the message even if the queue is full.
        """
        # Messages without data count as well, or any number of them would fit.
        size += _OVERHEAD_BYTES
        with self._changed:
            # An empty queue takes a message of any size: one that exceeds the limit travels alone.
            while may_wait and self._bytes and self._bytes + size > LIMIT_BYTES and not self._is_closed:
                self._changed.wait()
            # The queue may have ended while this call waited for room.
            if self._is_closed:
                return False
            self._items.append((item, size))
            self._bytes += size
            self._changed.notify_all()
            return True

    def take(self) -> list[Any] | None:
        """Block until there are messages, and return those that travel together; None at the end.

        Deferred messages must follow everything queued before them: a producer queues its use of an array,
        and only then frees the array. So `take_deferred` is called only while the queue is empty, under the
        lock that `put` needs: nothing can be queued between the check and the call.
        """
        with self._changed:
            while not self._items and not self._is_closed:
                if not self._changed.wait_for(self._has_items_or_ended, self._linger_s):
                    deferred = self._take_deferred()
                    if deferred is not None:
                        return [deferred]
            if self._is_cut or not self._items:
                return None
            batch = self._pop_batch()
            if not self._items and (deferred := self._take_deferred()) is not None:
                batch.append(deferred)
        return batch

    def _has_items_or_ended(self) -> bool:
        return bool(self._items) or self._is_closed

    def _pop_batch(self) -> list[Any]:
        """Remove the first messages, at least one and at most `_BATCH_BYTES`, and wake blocked producers."""
        batch: list[Any] = []
        size = 0
        while self._items and (not batch or size + self._items[0][1] <= _BATCH_BYTES):
            item, item_size = self._items.popleft()
            batch.append(item)
            size += item_size
        self._bytes -= size
        self._changed.notify_all()
        return batch

    def close(self) -> None:
        """Refuse new messages; those that are queued are still taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def cut(self) -> None:
        """Refuse new messages and drop those that are queued: the stream is gone."""
        with self._changed:
            self._is_closed = self._is_cut = True
            # Blocked producers wake and see the end. The data must not stay in memory, since nobody takes it.
            self._items.clear()
            self._bytes = 0
            self._changed.notify_all()
