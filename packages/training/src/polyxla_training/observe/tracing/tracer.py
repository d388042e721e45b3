"""Finds the lines that read the device or fall back, by watching every call of torch.

It is a function mode, which sits above torch's dispatcher and changes no tensor. A dispatch mode would change
some: under one, torch_xla 2.9 does not functionalize the results of its collectives, and views of them, such
as ``split`` makes, hold wrong values.

Torch keeps modes on a stack. ``with mode:`` pushes one, and its end pops whatever is on top. A tracer begins
and ends at step boundaries, which may lie inside or outside of the user's own ``with`` blocks, so it cannot
be on top: a block that ends would pop the tracer and leave the user's mode behind. It is therefore inserted
below the modes that are on the stack already, and taken out from any place; see `_insert` and `_remove`.
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

from polyxla.plugin import BACKWARD, caller
from polyxla_training.observe.tracing.findings import TILE_ROWS, Finding, Kind
from polyxla_training.observe.tracing.flops import flops, rows

if TYPE_CHECKING:
    from polyxla.plugin import Counters, Counts

_T = torch.Tensor
_READS = {
    *(_T.item, _T.__bool__, _T.__float__, _T.__int__, _T.__index__, _T.__complex__, _T.__contains__),
    *(_T.__format__, _T.is_nonzero, torch.is_nonzero),
    *(_T.equal, torch.equal, _T.allclose, torch.allclose),
}
_MOVES = {_T.cpu, _T.to, _T.type, _T.copy_}
LEAST_PADDING = 25
"""Percentage of the products' work from which padding is reported: as with 6 rows in place of 8."""
_SHOWS = {_T.__repr__, _T.__format__}


class Tracer(TorchFunctionMode):
    """Watches one thread's calls of torch between `start` and `stop`.

    Args:
        counters: show which call made the host read or compute.
        is_shared: whether other replicas are threads of this process, which the counters include.
        on_tpu: whether the device is a TPU, also an emulated one, which pads small batches.

    Attributes:
        is_on: whether it is watching.
        found: number of occurrences of each finding.
        flops: floating-point operations since `start`, as `polyxla_training.observe.tracing.flops` counts
            them, without those that the backward pass recomputes (checkpointed activations).
        compiled_at: the last line that cut the step and had a program compiled; None if none did.
    """

    def __init__(self, counters: Counters, *, is_shared: bool = False, on_tpu: bool = False) -> None:
        super().__init__()
        _end_in_forks_and_compilers()
        self._counters, self._is_shared = counters, is_shared
        self._fallbacks: dict[str, int] = {}
        self._on_tpu = on_tpu
        self._padded: Counter[tuple[int, str]] = Counter()
        self._is_backward = False
        self.is_on = False
        self.found: Counter[Finding] = Counter()
        self.flops = 0
        self.compiled_at: str | None = None

    def start(self) -> None:
        """Watch from now on, below all modes that are active in this thread."""
        self.found.clear()
        self._fallbacks = self._counters.fallbacks()
        self._padded.clear()
        self.flops, self.compiled_at = 0, None
        _insert(self)
        self.is_on = True

    def stop(self) -> bool:
        """Stop watching; return whether everything since `start` was seen."""
        _remove(self)
        was_on, self.is_on = self.is_on, False
        if was_on:
            self._find_padding()
        return was_on

    def _find_padding(self) -> None:
        wasted = sum(self._padded.values())
        percentage = round(100 * wasted / (self.flops + wasted)) if wasted else 0
        if percentage >= LEAST_PADDING:
            [((number, line), _)] = self._padded.most_common(1)
            self.found[Finding("padding", f"{number} row{'s' * (number > 1)}", line)] = percentage

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the call, and record what it made the host do."""
        kwargs = kwargs or {}
        # Attribute reads, such as a shape, are the most frequent calls, and none of them waits.
        if not self.is_on or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if func is _T.backward and not types and not self._is_backward:
            return self._backward(*args, **kwargs)
        before = self._counters.counts()
        result = func(*args, **kwargs)
        self._compare(func, args, result, self._counters.counts().since(before))
        if not self._is_backward:
            count = flops(func, args, kwargs, result)
            self.flops += count
            if self._on_tpu and count and (number := rows(func, result)) % TILE_ROWS:
                # Of each tile of rows, the part that is padding.
                self._padded[number, caller(__name__) or ""] += count * (-number % TILE_ROWS) // number
        return result

    def _backward(self, loss: torch.Tensor, gradient: Any = None, **options: Any) -> None:
        """Run the backward pass while watching the calls of its hooks.

        Torch disables the mode inside of a function that the mode handles, so it is pushed again, on top,
        for the time of the pass.
        """
        self._is_backward = True
        _push_mode(self)
        try:
            torch.autograd.backward(loss, gradient, **options)
        finally:
            _remove(self)
            self._is_backward = False
        for op in self._fallen_back():
            self.found[Finding("fallback", op, BACKWARD)] += 1

    def _compare(self, func: Any, args: tuple[Any, ...], result: Any, delta: Counts) -> None:
        has_compiled = delta.compiles > 0
        reads = 1 if self._is_shared else delta.host_reads
        if copy := _copy(func, args, result):
            # A device that torch does not know is printed by reading each element.
            kind: Kind = "read" if reads and not self._is_shared else "copy"
            self._note(kind, [copy], reads if kind == "read" else 1, has_compiled=has_compiled)
        elif not delta.host_reads:
            return
        elif (ops := self._fallen_back()) and func not in _READS:
            self._note("fallback", ops, 1, has_compiled=has_compiled)
        elif func in _READS or not self._is_shared:
            self._note("read", [resolve_name(func) or str(func)], reads, has_compiled=has_compiled)

    def _fallen_back(self) -> list[str]:
        before, self._fallbacks = self._fallbacks, self._counters.fallbacks()
        return [op for op, count in self._fallbacks.items() if count > before.get(op, 0)]

    def _note(self, kind: Kind, ops: list[str], count: int, *, has_compiled: bool) -> None:
        line = caller(__name__)
        if line is None:
            return
        for op in ops:
            self.found[Finding(kind, op, line)] += count
        if has_compiled:
            self.compiled_at = line


def _copy(func: Any, args: tuple[Any, ...], result: Any) -> str | None:
    """Return the name of the call if it copies a whole tensor from the device, or None."""
    if func in _MOVES and isinstance(result, torch.Tensor):
        leaves = result.device.type == "cpu" and any(map(_is_on_device, args[:2]))
        return resolve_name(func) if leaves else None
    if func is _T.tolist or (func in _SHOWS and (func is _T.__repr__ or args[0].dim())):
        name = resolve_name(func) if func is _T.tolist else "print"
        return name if _is_on_device(args[0]) else None
    return None


def _is_on_device(value: Any) -> bool:
    # Subclasses, such as those that torch.compile traces with, have no memory on the device.
    return type(value) in {torch.Tensor, torch.nn.Parameter} and value.device.type not in {"cpu", "meta"}


def _insert(tracer: Tracer) -> None:
    """Put the tracer below all modes of the user, so that each of their blocks pops its own mode."""
    _remove(tracer)
    modes = _get_current_function_mode_stack()
    # The mode of torch.set_default_device stays at the bottom, where torch looks for it to end it.
    _replace_stack([*filter(_is_bottom, modes), tracer, *(mode for mode in modes if not _is_bottom(mode))])


def _is_bottom(mode: TorchFunctionMode) -> bool:
    return mode is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _remove(tracer: Tracer) -> None:
    """Take the tracer out of the stack, from any place."""
    modes = _get_current_function_mode_stack()
    if tracer in modes:
        _replace_stack([mode for mode in modes if mode is not tracer])


def _replace_stack(modes: list[TorchFunctionMode]) -> None:
    # Torch can only pop and push the top.
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


@functools.cache
def _end_in_forks_and_compilers() -> None:
    """End tracing in forked processes, such as a DataLoader's workers, and before torch.compile compiles."""
    os.register_at_fork(after_in_child=_end_here)
    register: Callable[[Callable[[object], None]], Any] = on_compile_start
    register(_end_here)


def _end_here(_: object = None) -> None:
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, Tracer):
            mode.stop()
