"""Operators that torch_xla 2.9.0 computes wrongly, and in silence, also on a real TPU. Heavy.

The gradient of ``elu`` ignores the options and whether it gets the input or the result; ``celu`` ignores
``alpha``; a norm of infinite order is 1; average pooling ignores ``divisor_override``.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

_KEY = "XLA"
_NORMS = ("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype")
_library = torch.library.Library("aten", "IMPL")


@functools.cache
def replace() -> None:
    """Compute them as torch does, from now on. Several runtimes may call this."""
    with warnings.catch_warnings():
        # torch reports that an operator is replaced.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        _library.impl("elu", _elu, _KEY)
        _library.impl("elu_backward", _elu_backward, _KEY)
        _library.impl("celu", _celu, _KEY)
        for name in ("selu", "selu_"):
            # Both are an elu. Without this, torch warns at the first that gradients may be wrong.
            _library.impl(name, torch.library.fallthrough_kernel, f"Autograd{_KEY}")
        for name in _NORMS:
            _replace(name, _norm)
        for dims in (2, 3):
            _replace(f"avg_pool{dims}d", functools.partial(_avg_pool, dims=dims))


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
    # Padded until every window is whole: the mean is then the sum divided by the window's size.
    sizes, strides, paddings = ([*one] * (dims // len(one)) for one in (sizes, strides or sizes, paddings))
    margins: list[int] = []
    for length, size, stride, padding in zip(x.shape[-dims:], sizes, strides, paddings, strict=True):
        room = length + 2 * padding - size
        last = -(-room // stride) if ceil_mode else room // stride
        # A window may not begin behind the input.
        last -= last * stride >= length + padding
        margins = [padding, padding + max(0, last * stride - room), *margins]
    means = of_torch_xla(F.pad(x, margins), sizes, strides, [0], False, True, None)
    return means * (math.prod(sizes) / divisor)
