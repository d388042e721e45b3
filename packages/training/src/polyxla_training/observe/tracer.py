"""Finds the lines that read the device or fall back, by watching every call of torch in a few steps.

It watches above torch's dispatcher, and changes no tensor. A dispatch mode would: under one, torch_xla 2.9
does not functionalize what its collectives return, and views of that, as ``split`` makes, hold other values.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.callback import on_compile_start
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
    resolve_name,
)

from polyxla.callsite import BACKWARD, caller
from polyxla_training.observe.findings import Finding, Kind
from polyxla_training.observe.flops import flops

if TYPE_CHECKING:
    from polyxla.contracts.counters import Counters, Counts

_T = torch.Tensor
_READS = {
    *(_T.item, _T.__bool__, _T.__float__, _T.__int__, _T.__index__, _T.__complex__, _T.__contains__),
    *(_T.__format__, _T.is_nonzero, torch.is_nonzero),
    *(_T.equal, torch.equal, _T.allclose, torch.allclose),
}
_MOVES = {_T.cpu, _T.to, _T.type, _T.copy_}
_SHOWS = {_T.__repr__, _T.__format__}


class Tracer(TorchFunctionMode):
    """Watches what one thread calls of torch between `start` and `stop`.

    Args:
        counters: tells which call made the host read or work.
        is_shared: whether other replicas are threads of this process, which the counters counts as well.

    Attributes:
        is_on: whether it watches.
        found: how often each line did what.
        flops: floating-point operations since `start`, as `polyxla_training.observe.flops` counts them. What the
            backward pass computes again (checkpointed activations) is left out.
        compiled_at: the line at which the last program inside the step was cut and compiled.
    """

    def __init__(self, counters: Counters, *, is_shared: bool = False) -> None:
        super().__init__()
        _step_aside_for_others()
        self._counters, self._is_shared = counters, is_shared
        self._fallbacks: dict[str, int] = {}
        self._is_backward = False
        self.is_on = False
        self.found: Counter[Finding] = Counter()
        self.flops = 0
        self.compiled_at: str | None = None

    def start(self) -> None:
        """Watch from now on, below all modes that are in force here."""
        self.found.clear()
        self._fallbacks = self._counters.fallbacks()
        self.flops, self.compiled_at = 0, None
        _put_below(self)
        self.is_on = True

    def stop(self) -> bool:
        """Watch no longer; return whether all that happened since `start` was seen."""
        _take_out(self)
        was_on, self.is_on = self.is_on, False
        return was_on

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the call, and note what it made the host do."""
        kwargs = kwargs or {}
        # Attributes, such as a shape, are asked for more often than anything.
        if not self.is_on or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if func is _T.backward and not types and not self._is_backward:
            return self._backward(*args, **kwargs)
        before = self._counters.counts()
        result = func(*args, **kwargs)
        self._compare(func, args, result, self._counters.counts().since(before))
        if not self._is_backward:
            self.flops += flops(func, args, kwargs, result)
        return result

    def _backward(self, loss: torch.Tensor, gradient: Any = None, **options: Any) -> None:
        """Go on watching within, for hooks; a function that is watched is not watched inside otherwise."""
        self._is_backward = True
        _push_mode(self)
        try:
            torch.autograd.backward(loss, gradient, **options)
        finally:
            _take_out(self)
            self._is_backward = False
        for op in self._fallen_back():
            self.found[Finding("fallback", op, BACKWARD)] += 1

    def _compare(self, func: Any, args: tuple[Any, ...], result: Any, delta: Counts) -> None:
        has_compiled = delta.compiles > 0
        if copy := _copy(func, args, result):
            self._note("copy", [copy], has_compiled=has_compiled)
        elif not delta.host_reads:
            return
        elif (ops := self._fallen_back()) and func not in _READS:
            self._note("fallback", ops, has_compiled=has_compiled)
        elif func in _READS or not self._is_shared:
            self._note("read", [resolve_name(func) or str(func)], has_compiled=has_compiled)

    def _fallen_back(self) -> list[str]:
        before, self._fallbacks = self._fallbacks, self._counters.fallbacks()
        return [op for op, count in self._fallbacks.items() if count > before.get(op, 0)]

    def _note(self, kind: Kind, ops: list[str], *, has_compiled: bool) -> None:
        line = caller(__name__)
        if line is None:
            return
        for op in ops:
            self.found[Finding(kind, op, line)] += 1
        if has_compiled:
            self.compiled_at = line


def _copy(func: Any, args: tuple[Any, ...], result: Any) -> str | None:
    """Return the name of what copies a whole tensor from the device; None if that is not done here."""
    if func in _MOVES and isinstance(result, torch.Tensor):
        leaves = result.device.type == "cpu" and any(map(_is_on_device, args[:2]))
        return resolve_name(func) if leaves else None
    if func is _T.tolist or (func in _SHOWS and (func is _T.__repr__ or args[0].dim())):
        name = resolve_name(func) if func is _T.tolist else "print"
        return name if _is_on_device(args[0]) else None
    return None


def _is_on_device(value: Any) -> bool:
    # Subclasses have no memory on the device: what torch.compile traces with, for one.
    return type(value) in {torch.Tensor, torch.nn.Parameter} and value.device.type not in {"cpu", "meta"}


def _put_below(tracer: Tracer) -> None:
    """Put it where no other mode's end can take it away in its own place: each pops the topmost."""
    _take_out(tracer)
    modes = _get_current_function_mode_stack()
    # But above that of torch.set_default_device, which is the lowest, and ends as such.
    _replace([*filter(_is_lowest, modes), tracer, *(one for one in modes if not _is_lowest(one))])


def _is_lowest(mode: TorchFunctionMode) -> bool:
    return mode is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _take_out(tracer: Tracer) -> None:
    modes = _get_current_function_mode_stack()
    if tracer in modes:
        _replace([one for one in modes if one is not tracer])


def _replace(modes: list[TorchFunctionMode]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


@functools.cache
def _step_aside_for_others() -> None:
    """Let no forked process, such as a DataLoader's worker, go on watching, and torch.compile not see it."""
    os.register_at_fork(after_in_child=_end_here)
    register: Callable[[Callable[[object], None]], Any] = on_compile_start
    register(_end_here)


def _end_here(_: object = None) -> None:
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, Tracer):
            mode.stop()
