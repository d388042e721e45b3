"""Optimizer steps and batches of DataLoaders in this process, for the replica in whose thread they happen."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter


class Receiver(Protocol):
    """Receives the events of one replica."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has updated its parameters."""

    def batch_read(self, iterator: Any) -> None:
        """A DataLoader's iterator is about to read a batch, in a thread of this process."""


_lock = threading.Lock()
_receivers: dict[int, Receiver] = {}
_installed: list[Any] = []


def attach(receiver: Receiver) -> None:
    """Send the events of the calling thread to `receiver`, until `detach`."""
    with _lock:
        if not _receivers:
            _install()
        _receivers[threading.get_ident()] = receiver


def detach() -> None:
    """Send the calling thread's events to nobody; after the last one, leave torch as it was."""
    with _lock:
        if _receivers.pop(threading.get_ident(), None) is not None and not _receivers:
            _uninstall()


def _install() -> None:
    _installed.append(register_optimizer_step_post_hook(_after_step))
    plain = _BaseDataLoaderIter.__next__

    def read_next(self: _BaseDataLoaderIter) -> Any:
        if receiver := _reader():
            receiver.batch_read(self)
        return plain(self)

    _BaseDataLoaderIter.__next__ = read_next  # type: ignore[method-assign]
    _installed.extend([plain, read_next])


def _uninstall() -> None:
    hook, plain, ours = _installed
    _installed.clear()
    hook.remove()
    # Somebody else may have replaced it meanwhile, and calls ours.
    if _BaseDataLoaderIter.__next__ is ours:
        _BaseDataLoaderIter.__next__ = plain  # type: ignore[method-assign]


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # torch.compile, which may compile an optimizer's step, sees a constant here and nothing else.
    if torch.compiler.is_compiling():
        return
    if receiver := _receivers.get(threading.get_ident()):
        receiver.optimizer_stepped(optimizer)


def _reader() -> Receiver | None:
    """Return the receiver for this thread; where there is one only, other threads read for it."""
    if receiver := _receivers.get(threading.get_ident()):
        return receiver
    return next(iter(_receivers.values()), None) if len(_receivers) == 1 else None
