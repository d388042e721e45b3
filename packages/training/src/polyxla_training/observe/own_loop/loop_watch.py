"""The listener that watches every replica of `polyxla.launch`, unless POLYXLA_OBSERVE is off.

It compares counters that torch_xla keeps anyway, once per step, and adds no execution, no transfer and no
compilation to one. Where it finds nothing, it prints nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from polyxla import hookimpl
from polyxla.plugin import say, user_line
from polyxla_training.env import POLYXLA_OBSERVE
from polyxla_training.observe.observer import Observer
from polyxla_training.observe.own_loop.loop_summary import LoopSummary
from polyxla_training.observe.own_loop.step_watch import StepWatch
from polyxla_training.observe.own_loop.trained import ReadDatasets, TrainedParameters

if TYPE_CHECKING:
    from polyxla import Replica


class Receiver(Protocol):
    """Receives the events of one replica."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has updated its parameters."""

    def batch_read(self, iterator: Any) -> None:
        """A DataLoader's iterator is about to read a batch, in a thread of this process."""


# Replicas may be threads of one process: the first that attaches installs the hooks for all, and the last
# that detaches removes them.
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
    """Stop sending the calling thread's events; the last thread that stops restores torch."""
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
    # If another library has replaced the method since, its version calls ours, which then only passes on.
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


class LoopWatch:
    """Watches one replica: its steps, if it is ordinal 0; and what it trains on, if there are several.

    A step is a call of `polyxla.Replica.step`, or else of the first optimizer's ``step()``.

    Args:
        replica: the replica to watch, in its thread.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._steps: StepWatch | None = None
        self._datasets = ReadDatasets() if replica.world_size > 1 else None
        self._parameters = TrainedParameters(replica) if replica.world_size > 1 else None
        self._optimizer_steps = 0
        self._first_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._latest_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._line: str | None = None
        self._makes_steps = False
        self._is_broken = False
        attach(self)

    def batch_read(self, iterator: Any) -> None:
        """Record which dataset is read."""
        if self._datasets:
            self._guarded(self._datasets.batch_read, iterator)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what is trained; in a loop without `Replica.step`, end a step."""
        self._guarded(self._optimizer_stepped, optimizer)

    def _guarded(self, watch: Callable[..., None], *arguments: Any) -> None:
        """Keep a defect of the watch from ending the training that it watches."""
        if self._is_broken:
            return
        try:
            watch(*arguments)
        except Exception as error:
            # Not tried again: the same defect would be reported at every step.
            self._is_broken = True
            what = f"{type(error).__name__}: {error}"
            say(f"the loop is no longer watched: {what}; {POLYXLA_OBSERVE}=off avoids it")

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer_steps += 1
        if self._datasets and self._parameters:
            self._datasets.step()
            self._parameters.see(optimizer)
        if self._optimizer_steps == 1:
            self._begin(optimizer)
        elif self._steps and not self._makes_steps and self._is_first(optimizer):
            # `Replica.step` would have ended the first step: the loop calls the optimizer itself.
            self._steps.optimizer_stepped(self._optimizer_steps, optimizer)
        # Weak references: the watch must not keep an optimizer, and with it a model, alive.
        self._latest_optimizer = weakref.ref(optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._line = user_line()
        self._first_optimizer = weakref.ref(optimizer)
        # A Trainer adds an Observer, and so may the user: then the steps are observed already.
        hooks = self._replica.hook.polyxla_step_finished.get_hookimpls()
        if self._replica.is_first and not any(isinstance(hook.plugin, Observer) for hook in hooks):
            self._steps = StepWatch(self._replica)

    def _is_first(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._first_optimizer is not None and self._first_optimizer() is optimizer

    @hookimpl
    def polyxla_step_finished(self, step: int, logged: Mapping[str, Any]) -> None:
        """End a step of `Replica.step`."""
        self._guarded(self._step_finished, step, logged)

    def _step_finished(self, step: int, logged: Mapping[str, Any]) -> None:
        self._makes_steps = True
        optimizer = self._latest_optimizer() if self._latest_optimizer else None
        if self._steps and optimizer is not None:
            self._steps.step(step, optimizer)
            self._steps.log(step, logged)

    @hookimpl
    def polyxla_replica_summary(self) -> LoopSummary | None:
        """Return what the launching process compares with the other replicas."""
        if self._steps:
            self._guarded(self._steps.check_last)
        found: list[LoopSummary] = []
        self._guarded(lambda: found.extend(self._summaries()))
        return found[0] if found else None

    def _summaries(self) -> list[LoopSummary]:
        if not self._parameters or not self._datasets or not self._optimizer_steps:
            return []
        parameters = self._parameters.read(self._replica.counters(), self._optimizer_steps)
        dataset = self._datasets.trained_on(self._optimizer_steps)
        return [LoopSummary(self._optimizer_steps, self._line, parameters, dataset)]

    @hookimpl
    def polyxla_replica_stopped(self) -> None:
        """Restore torch, even after an error."""
        detach()
        if self._steps:
            self._steps.close()
