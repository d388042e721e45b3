"""Defects of torch_xla 2.9.0 that are mended in place, also on a real TPU. Heavy.

Operators that it computes wrongly, without an error: the gradient of ``elu`` ignores the options and whether
it gets the input or the result; ``celu`` ignores ``alpha``; a norm of infinite order is 1; average pooling
ignores ``divisor_override``; interpolation ignores ``scale_factor``, and takes the ratio of the sizes.

Collectives that write into their arguments: torch_xla replaces the value of such an argument behind torch's
back. If the argument is a view, the tensor behind it keeps its old values, and the view has them again after
its next in-place operation. So accumulated gradients that are reduced and then clipped, and gradients in the
buckets of DistributedDataParallel, were those of one replica. Here, a collective writes into a tensor of its
own, which torch then copies. In XLA's program, this adds a copy only where the argument is a view.

Errors of a dataset that torch_xla's loader reads ahead: torch_xla ends the epoch without reporting them.

Threads of a loader whose loop was left early: where one copies a batch while Python ends, Python ends it in
torch_xla's C++ code, which aborts the process (SIGABRT).
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import queue
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch_xla
from torch.nn import functional as F
from torch_xla.distributed.parallel_loader import ParallelLoader

_KEY = "XLA"
_NORMS = ("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype")
_library = torch.library.Library("aten", "IMPL")


_LEAVE_S = 5.0
"""Longest wait at the program's end for the threads of loaders, in seconds; a dataset may hang."""
_loaders: weakref.WeakSet[Any] = weakref.WeakSet()
_WRITTEN = {
    "_xla_all_reduce_inplace": 1,
    "_xla_all_gather_out": 0,
    "_xla_all_gather_coalesced_out": 0,
    "_xla_reduce_scatter_out": 1,
    "_xla_reduce_scatter_coalesced_out": 1,
}
"""Functions of torch_xla's C++ module, with the position of the tensor or list that each writes into."""


@functools.cache
def mend_torch_xla() -> None:
    """Mend all of them, from now on. Several runtimes may call this."""
    _raise_in_loop()
    _end_loaders_before_python()
    _replace_operators()
    _replace_collectives()


def _replace_operators() -> None:
    """Compute the operators as torch does."""
    with warnings.catch_warnings():
        # torch reports that an operator is replaced.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        _library.impl("elu", _elu, _KEY)
        _library.impl("elu_backward", _elu_backward, _KEY)
        _library.impl("celu", _celu, _KEY)
        for name in ("selu", "selu_"):
            # Both fall through to elu. Without this, torch warns that gradients may be wrong.
            _library.impl(name, torch.library.fallthrough_kernel, f"Autograd{_KEY}")
        for name in _NORMS:
            _replace(name, _norm)
        for dims in (2, 3):
            _replace(f"avg_pool{dims}d", functools.partial(_avg_pool, dims=dims))
        for mode in ("nearest2d", "bilinear2d"):
            is_nearest = mode == "nearest2d"
            _replace(f"upsample_{mode}", functools.partial(_interpolated, is_nearest=is_nearest))
            gradient = functools.partial(_interpolated_backward, is_nearest=is_nearest)
            _replace(f"upsample_{mode}_backward", gradient)


def _replace(name: str, function: Callable[..., torch.Tensor]) -> None:
    """Replace an operator by a function that gets what torch_xla computes as its first argument."""
    kernel = torch.library.get_kernel(f"aten::{name}", _KEY)

    def replaced(keys: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return function(lambda *own, **named: kernel.call_boxed(keys, *own, **named), *args, **kwargs)

    _library.impl(name, replaced, _KEY, with_keyset=True)


def _elu(x: torch.Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> torch.Tensor:
    return torch.where(x <= 0, torch.expm1(x * input_scale) * (alpha * scale), x * scale)


def _celu(x: torch.Tensor, alpha: float = 1) -> torch.Tensor:
    return _elu(x, alpha, 1, 1 / alpha)


def _elu_backward(
    gradient: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: torch.Tensor
) -> torch.Tensor:
    low = alpha * scale
    below = (x + low if is_result else torch.exp(x * input_scale) * low) * input_scale
    return gradient * torch.where(x <= 0, below, scale)


def _norm(
    of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor, p: float | None = 2, *args: Any, **kwargs: Any
) -> torch.Tensor:
    if p is None or math.isfinite(p):
        return of_torch_xla(x, p, *args, **kwargs)
    dim, keepdim = [*args, None, False][:2]
    # Norms over all dimensions are written as norms over none of them.
    norm: torch.Tensor = torch.linalg.vector_norm(x, p, dim or None, bool(keepdim), **kwargs)
    return norm


def _avg_pool(
    of_torch_xla: Callable[..., torch.Tensor],
    x: torch.Tensor,
    sizes: Sequence[int],
    strides: Sequence[int] = (),
    paddings: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
    *,
    dims: int,
) -> torch.Tensor:
    if divisor is None:
        return of_torch_xla(x, sizes, strides, paddings, ceil_mode, count_include_pad, divisor)
    # Pad until every window is whole: the mean is then the sum divided by the window's size.
    # torch accepts a single number for all dimensions.
    options = (sizes, strides or sizes, paddings)
    sizes, strides, paddings = ([*numbers] * (dims // len(numbers)) for numbers in options)
    margins: list[int] = []
    for length, size, stride, padding in zip(x.shape[-dims:], sizes, strides, paddings, strict=True):
        room = length + 2 * padding - size
        last = -(-room // stride) if ceil_mode else room // stride
        # No window may begin beyond the input.
        last -= last * stride >= length + padding
        margins = [padding, padding + max(0, last * stride - room), *margins]
    means = of_torch_xla(F.pad(x, margins), sizes, strides, [0], False, True, None)
    return means * (math.prod(sizes) / divisor)


def _interpolated(
    of_torch_xla: Callable[..., torch.Tensor],
    x: torch.Tensor,
    sizes: Sequence[int],
    *options: Any,
    is_nearest: bool,
) -> torch.Tensor:
    scales = _own_scales(x.shape[2:], sizes, options, is_nearest)
    if scales is None:
        return of_torch_xla(x, sizes, *options)
    if is_nearest:
        for dim, size, scale in zip((2, 3), sizes, scales, strict=True):
            x = x.index_select(dim, _nearest(x.shape[dim], size, scale).to(x.device))
        return x
    result = x.to(_exact(x))
    for dim, size, scale in zip((2, 3), sizes, scales, strict=True):
        taps = _linear(x.shape[dim], size, scale, result)
        low, high = (result.index_select(dim, i) * _along(weight, dim) for i, weight in taps)
        result = low + high
    return result.to(x.dtype)


def _interpolated_backward(
    of_torch_xla: Callable[..., torch.Tensor],
    gradient: torch.Tensor,
    sizes: Sequence[int],
    shape: Sequence[int],
    *options: Any,
    is_nearest: bool,
) -> torch.Tensor:
    scales = _own_scales(shape[2:], sizes, options, is_nearest)
    if scales is None:
        return of_torch_xla(gradient, sizes, shape, *options)
    result = gradient.to(_exact(gradient))
    for dim, size, scale in zip((2, 3), sizes, scales, strict=True):
        if is_nearest:
            parts = [(_nearest(shape[dim], size, scale).to(result.device), result)]
        else:
            taps = _linear(shape[dim], size, scale, result)
            parts = [(i, result * _along(weight, dim)) for i, weight in taps]
        result = result.new_zeros([*result.shape[:dim], shape[dim], *result.shape[dim + 1 :]])
        for i, part in parts:
            result = result.index_add(dim, i, part)
    return result.to(gradient.dtype)


def _own_scales(
    shape: Sequence[int], sizes: Sequence[int], options: Sequence[Any], is_nearest: bool
) -> tuple[float, float] | None:
    """Return ``scale_factor`` for both dimensions, if it is another than the ratio of the sizes."""
    # torch leaves out arguments at the end that are None.
    aligns_corners, down, across = [*([False] if is_nearest else []), *options, None, None][:3]
    if aligns_corners or not down or not across or [shape[0] * down, shape[1] * across] == [*sizes]:
        return None
    return down, across


def _exact(x: torch.Tensor) -> torch.dtype:
    """Return the type in which torch interpolates."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _nearest(length: int, size: int, scale: float) -> torch.Tensor:
    """Return the index of the input for each element along a dimension, on the host, where torch rounds.

    Source: torch 2.9, ``aten/src/ATen/native/UpSample.h``.
    """
    ratio = torch.tensor(1 / scale, dtype=torch.float32)
    return (torch.arange(size) * ratio).floor().long().clamp(max=length - 1)


def _linear(
    length: int, size: int, scale: float, like: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the indices of both neighbours of each element along a dimension, with their weights.

    Source: torch 2.9, ``aten/src/ATen/native/UpSample.h``.
    """
    ratio = torch.tensor(1 / scale, dtype=like.dtype)
    there = ((torch.arange(size) + 0.5) * ratio - 0.5).clamp(min=0)
    low = there.floor().long().clamp(max=length - 1)
    high = (low + 1).clamp(max=length - 1)
    weight = (there - low).clamp(0, 1)
    return [(i.to(like.device), part.to(like.device)) for i, part in ((low, 1 - weight), (high, weight))]


def _along(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the weights of a dimension's indices in a shape that fits a batch of images."""
    return weight.reshape(-1, 1) if dim == 2 else weight


_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]


def _replace_collectives() -> None:
    """Replace the functions through which all of torch_xla writes."""
    for name, position in _WRITTEN.items():
        setattr(_native, name, _copying(getattr(_native, name), position))


def _copying(collective: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*arguments: Any) -> Any:
        # The argument is a tensor or a list of tensors, and the collective is called with the same kind.
        given = arguments[position]
        written = [given] if isinstance(given, torch.Tensor) else list(given)
        own = [tensor.detach().clone() for tensor in written]
        into = own[0] if isinstance(given, torch.Tensor) else own
        result = collective(*arguments[:position], into, *arguments[position + 1 :])
        # torch_xla's functions record no gradient, and neither must the copy.
        with torch.no_grad():
            for tensor, value in zip(written, own, strict=True):
                tensor.copy_(value)
        return result

    return call


class _Reported:
    """A loader whose exception ends the iteration, and is raised where the loop waits for the batch.

    Args:
        loader: what torch_xla reads in a thread.
        errors: what torch_xla's iterator raises once no batch is left.
    """

    def __init__(self, loader: Iterable[Any], errors: queue.Queue[BaseException]) -> None:
        self._loader, self._errors = loader, errors

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._loader
        except GeneratorExit:
            # The user left the loop early, which is not an error of the dataset.
            raise
        except BaseException as error:
            # Stored before the iteration ends, because the loop then looks for it.
            self._errors.put(error)


def _raise_in_loop() -> None:
    """Make a loop over ``MpDeviceLoader`` or ``ParallelLoader`` raise what ended its dataset."""
    read: Any = ParallelLoader._loader_worker

    @functools.wraps(read)
    def loader_worker(self: Any) -> None:
        self._cpu_loader = _Reported(self._cpu_loader, self._exception_queue)
        read(self)

    ParallelLoader._loader_worker = loader_worker  # type: ignore[method-assign]


def _end_loaders_before_python() -> None:
    """Have the program's end wait for the threads of loaders that are still copying."""
    make: Any = ParallelLoader.__init__

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _loaders.add(self)

    any_loader: Any = ParallelLoader
    any_loader.__init__ = init
    atexit.register(_end_loaders)
    # A fork has none of the threads, and may have their queues' locks.
    os.register_at_fork(after_in_child=_loaders.clear)


def _end_loaders() -> None:
    deadline = time.monotonic() + _LEAVE_S
    loaders = list(_loaders)
    # `ParallelLoader.close` does the same, but waits for a dataset that hangs.
    for loader in loaders:
        loader._done = True
        for waiting in loader._queues.values():
            waiting.queue.close()
            waiting.cpu_loader_queue.close()
    for thread in [thread for loader in loaders for thread in loader._threads]:
        thread.join(max(0.0, deadline - time.monotonic()))
