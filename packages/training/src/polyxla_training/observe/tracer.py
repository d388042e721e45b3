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
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.callback import on_compile_start
from torch.nn import functional as F
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
    resolve_name,
)

from polyxla.plugin import BACKWARD, caller
from polyxla_training.observe.slow_lines import TILE_ROWS, Kind, SlowLine

if TYPE_CHECKING:
    from polyxla.plugin import Counters, Counts

WITH_BACKWARD = 3
"""Cost of a differentiated product, in forward passes: the backward pass takes twice the forward pass.

Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models" (arXiv:2001.08361), section 2.1.
"""


def rows(func: Any, result: Any) -> int:
    """Return the rows of a matrix product, which grow with the batch; 0 for other functions."""
    is_product = _FORMULAS.get(func) in (_product, _added_product, _reflected_product)
    return result.numel() // result.shape[-1] if is_product and result.dim() > 1 and result.numel() else 0


def flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the operations of ``func(*args, **kwargs)``, and of its backward pass if it will have one.

    Returns:
        forward operations, times `WITH_BACKWARD` if the result requires a gradient; 0 for other functions.
    """
    formula = _FORMULAS.get(func)
    if formula is None:
        return 0
    values = (*args, *kwargs.values())
    out = result if isinstance(result, torch.Tensor) else result[0]
    return formula(values, out) * (WITH_BACKWARD if out.requires_grad else 1)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _product(values: Sequence[Any], out: torch.Tensor) -> int:
    return 2 * out.numel() * _tensors(values)[0].shape[-1]


def _added_product(values: Sequence[Any], out: torch.Tensor) -> int:
    return _product(_tensors(values)[1:], out)


def _reflected_product(values: Sequence[Any], out: torch.Tensor) -> int:
    return _product(_tensors(values)[::-1], out)


def _convolution(values: Sequence[Any], out: torch.Tensor) -> int:
    # The weight is [out_channels, in_channels / groups, *kernel].
    return 2 * out.numel() * math.prod(_tensors(values)[1].shape[1:])


def _transposed_convolution(values: Sequence[Any], _: torch.Tensor) -> int:
    # The weight is [in_channels, out_channels / groups, *kernel].
    inputs, weight, *_rest = _tensors(values)
    return 2 * inputs.numel() * math.prod(weight.shape[1:])


def _attention(values: Sequence[Any], out: torch.Tensor) -> int:
    query, key, *_rest = _tensors(values)
    return 2 * key.shape[-2] * (query.numel() + out.numel())


def _multi_head_attention(values: Sequence[Any], _: torch.Tensor) -> int:
    # [sequence, batch, embedding]; four projections around the two products.
    query, key, value, *_rest = _tensors(values)
    size = query.shape[-1]
    projections = 2 * size * (2 * query.numel() + key.numel() + value.numel())
    return projections + 4 * key.shape[0] * query.numel()


def _recurrence(values: Sequence[Any], _: torch.Tensor) -> int:
    # The input's last dimension is the features, packed or not; the matrices are the weights of all layers.
    inputs = _tensors(values)[0]
    matrices = [tensor for value in values if isinstance(value, list | tuple) for tensor in _tensors(value)]
    weights = sum(matrix.numel() for matrix in matrices if matrix.dim() == 2)
    return 2 * inputs.numel() // max(1, inputs.shape[-1]) * weights


def _einsum(values: Sequence[Any], _: torch.Tensor) -> int:
    equation, operands = values[0], _tensors(values)
    # With more operands the cost depends on their order; sublists in place of an equation are rare.
    if not isinstance(equation, str) or len(operands) != 2:
        return 0
    sizes: dict[Any, int] = {}
    inputs = equation.replace(" ", "").partition("->")[0].split(",")
    for names, operand in zip(inputs, operands, strict=True):
        for name, size in zip(_dimensions(names, operand.dim()), operand.shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    return 2 * math.prod(sizes.values())


def _dimensions(names: str, dim: int) -> list[Any]:
    before, dots, after = names.partition("...")
    count = dim - len(before) - len(after)
    return [*before, *(range(-count, 0) if dots else ()), *after]


_BY_NAME: dict[str, Callable[[Sequence[Any], torch.Tensor], int]] = {
    **dict.fromkeys(("linear", "matmul", "__matmul__", "mm", "bmm", "mv", "dot", "inner"), _product),
    "__rmatmul__": _reflected_product,
    **dict.fromkeys(("addmm", "addmm_", "addmv", "baddbmm", "baddbmm_"), _added_product),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _multi_head_attention,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrence),
    "einsum": _einsum,
}
_FORMULAS = {
    getattr(place, name): formula
    for name, formula in _BY_NAME.items()
    for place in (torch, torch.Tensor, F)
    if hasattr(place, name)
}


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
        found: number of occurrences of each slow line.
        flops: floating-point operations since `start`, as `flops` counts
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
        self.found: Counter[SlowLine] = Counter()
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
        # A fork or torch.compile may have ended the tracer; what it saw is then only a part of the step.
        was_on, self.is_on = self.is_on, False
        if was_on:
            self._find_padding()
        return was_on

    def _find_padding(self) -> None:
        wasted = sum(self._padded.values())
        percentage = round(100 * wasted / (self.flops + wasted)) if wasted else 0
        if percentage >= LEAST_PADDING:
            [((number, line), _)] = self._padded.most_common(1)
            self.found[SlowLine("padding", f"{number} row{'s' * (number > 1)}", line)] = percentage

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the call, and record what it made the host do."""
        kwargs = kwargs or {}
        # Attribute reads, such as a shape, are the most frequent calls, and none of them waits for the
        # device.
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
                # The share of the product's work that falls on the rows which fill up the last tile.
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
            self.found[SlowLine("fallback", op, BACKWARD)] += 1

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
            self.found[SlowLine(kind, op, line)] += count
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
    # Exact types: subclasses, such as those that torch.compile traces with, have no memory on the device.
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
    # A forked worker inherits the stack of modes, and would trace its own work with the parent's counters.
    os.register_at_fork(after_in_child=_end_here)
    register: Callable[[Callable[[object], None]], Any] = on_compile_start
    register(_end_here)


def _end_here(_: object = None) -> None:
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, Tracer):
            mode.stop()
