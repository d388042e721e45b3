"""Ending a training, with a last checkpoint, when SIGTERM or Ctrl-C arrives.

`StopSignal` is the handler of one process; `forward_signals` passes its signal on to the replicas.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

from polyxla.plugin import private_directory, snapshot
from polyxla_training.storage import locate

_Handler = Callable[[int, FrameType | None], Any] | int | None


class StopSignal:
    """Records that the process was asked to end, instead of ending it at once.

    A context manager, true once a signal was received. The first signal restores the previous handler, which
    receives a second one: by default, that ends the process. A signal that is ignored stays so. Handlers
    belong to the main thread: in another one, this receives nothing but the Ctrl-C that a launch passes on to
    its replicas.

    Args:
        signals: the signals to handle; default: SIGTERM.
        then: called when a signal is received, in the main thread between two of its instructions, or in
            another thread.

    Attributes:
        received: the signal that was received, or None.
    """

    def __init__(self, *signals: signal.Signals, then: Callable[[], object] | None = None) -> None:
        self._then = then
        self.received: signal.Signals | None = None
        self._signals = signals or (signal.SIGTERM,)
        self._before: dict[signal.Signals, _Handler] = {}
        self._entered = contextlib.ExitStack()
        self._is_passed_on = False

    def __bool__(self) -> bool:
        return self.received is not None

    def __enter__(self) -> Self:
        if signal.SIGINT in self._signals:
            # Imported only where a training runs: each command of polyxla loads this package's hook specs.
            from polyxla.plugin import on_interrupt

            handled = on_interrupt(lambda: self._receive(signal.SIGINT, None))
            self._is_passed_on = self._entered.enter_context(handled)
        # Python allows only the main thread to install handlers; replicas in other threads learn of the
        # signal by the file.
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                # In a replica's process, the terminal's own Ctrl-C would be a second one.
                is_passed_on = number is signal.SIGINT and self._is_passed_on
                if not is_passed_on and signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._before):
            self._restore(number)
        self._entered.close()

    def raise_signal(self, number: signal.Signals) -> None:
        """End the process as the signal demands; or the replica, if its launch passes on that Ctrl-C."""
        if number is signal.SIGINT and self._is_passed_on:
            raise KeyboardInterrupt
        signal.raise_signal(number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # This must not take a lock: it interrupts the main thread, which may hold it.
        self.received = signal.Signals(number)
        # Restored at once, so that a second signal ends a program that does not react to the first.
        self._restore(self.received)
        if self._then is not None:
            self._then()

    def _restore(self, number: signal.Signals) -> None:
        before = self._before.pop(number, None)
        # A handler that was installed since then stays. None stands for a handler that was not installed from
        # Python, and which Python cannot restore.
        if signal.getsignal(number) == self._receive and before is not None:
            signal.signal(number, before)


SIGNALLED = "a signal"
"""Why a training ended, if SIGTERM or Ctrl-C asked it to."""
STOP_FILE = ".stop"
"""In the checkpoint directory, from the signal until the replicas have saved their last checkpoint."""
INTERRUPTED = b"polyxla: training ends after this step, and saves it; press Ctrl-C again to end at once\n"


def stop_file(checkpoint_dir: str | os.PathLike[str]) -> Path:
    """Return the file that asks the replicas of this host to stop.

    If the directory is in an object store, the file is in the user's private directory on this machine:
    replicas look for it between steps, which must not wait for a network.
    """
    directory = locate(checkpoint_dir)
    if isinstance(directory, Path):
        return directory / STOP_FILE
    name = hashlib.sha256(os.fspath(directory).encode()).hexdigest()[:16]
    return private_directory(snapshot()) / f"{name}{STOP_FILE}"


@contextlib.contextmanager
def forward_signals(checkpoint_dir: str | os.PathLike[str] | None) -> Iterator[StopSignal]:
    """Within the block, make the first SIGTERM or Ctrl-C stop the replicas after a checkpoint.

    A file carries the request: it reaches replicas in threads and in processes. A second signal does what it
    does without the block. Without a directory, so does the first one; outside the main thread, it is
    received only if a launch passes it on.

    Yields:
        What holds the signal that was received.
    """
    if checkpoint_dir is None:
        yield StopSignal()
        return
    # A file of a run that was killed would stop this one after its first step.
    file = stop_file(checkpoint_dir)
    file.unlink(missing_ok=True)
    with StopSignal(signal.SIGTERM, signal.SIGINT, then=lambda: _request_stop(file, stop)) as stop:
        try:
            yield stop
        finally:
            file.unlink(missing_ok=True)


def _request_stop(file: Path, stop: StopSignal) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        # Another replica of this host has received the signal, too, and has said so.
        return
    if stop.received is signal.SIGINT:
        # os.write instead of print(): this may have interrupted a print(), whose lock it would wait for.
        os.write(2, INTERRUPTED)
