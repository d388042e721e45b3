"""A signal handler that sets a flag, for a loop to check between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_Handler = Callable[[int, FrameType | None], Any] | int | None


class StopSignal:
    """Records that the process was asked to end, instead of ending it at once.

    A context manager, true once a signal was received. The first signal restores the previous handler, which
    receives a second one: by default, that ends the process. Handlers belong to the main thread; in another
    thread this installs nothing and stays false.

    Args:
        signals: the signals to handle; default: SIGTERM.
        then: called when a signal is received, in the main thread between two of its instructions.

    Attributes:
        received: the signal that was received, or None.
    """

    def __init__(self, *signals: signal.Signals, then: Callable[[], object] | None = None) -> None:
        self._then = then
        self.received: signal.Signals | None = None
        self._signals = signals or (signal.SIGTERM,)
        self._before: dict[signal.Signals, _Handler] = {}

    def __bool__(self) -> bool:
        return self.received is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for one in self._signals:
                self._before[one] = signal.signal(one, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for one in list(self._before):
            self._restore(one)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Takes no lock: this interrupts the main thread, which may hold it.
        self.received = signal.Signals(number)
        self._restore(self.received)
        if self._then is not None:
            self._then()

    def _restore(self, one: signal.Signals) -> None:
        before = self._before.pop(one)
        # A handler that was installed since then stays. None is one that was not set from Python.
        if signal.getsignal(one) == self._receive and before is not None:
            signal.signal(one, before)
