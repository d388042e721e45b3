"""Operators that torch_xla 2.9.0 computes wrongly, without an error, replaced also on a real TPU. Heavy.

docs/operators.md lists them. Where torch_xla says something wrong of a result, such as its shape, what is
computed from it is wrong. The functions here make no views: within an operator, torch_xla's views of views
are wrong. The operators that copy are the same in XLA's program.

torch_xla finds compiled programs, and shapes, by a hash. Where it leaves out an argument, such as a
dimension, a program of another dimension runs. The functions here make the argument part of the operands.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

_KEY = "XLA"
_library = torch.library.Library("aten", "IMPL")


def replace_operators() -> None:
    """Compute the operators as torch does, from now on."""
    with warnings.catch_warnings():
        # torch reports that an operator is replaced.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name, function in _OWN.items():
            _library.impl(name, function, _KEY)
        for name in _COMPOSED:
            # On the CPU, this key has the kernel that calls others.
            of_torch = torch.library.get_kernel(f"aten::{name}", "AutogradCPU")
            _library.impl(name, of_torch.call_boxed, f"Autograd{_KEY}", with_keyset=True)
        for name, function in _REPLACED.items():
            _replace(name, function)
        for dims in (2, 3):
            _library.impl(f"max_pool{dims}d", functools.partial(_max_pool, dims=dims), f"Autograd{_KEY}")
        _replace("einsum", _einsum, f"Autograd{_KEY}")
        _replace("_linalg_slogdet", _slogdet, f"Autograd{_KEY}")


def _replace(name: str, function: Callable[..., Any], key: str = _KEY) -> None:
    """Replace an operator by a function that gets what torch_xla computes as its first argument."""
    kernel = torch.library.get_kernel(f"aten::{name}", key)

    def replaced(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return function(lambda *own, **named: kernel.call_boxed(keys, *own, **named), *args, **kwargs)

    _library.impl(name, replaced, key, with_keyset=True)


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
    p = 2 if p is None else p
    if math.isfinite(p) and not kwargs and not x.is_complex():
        return of_torch_xla(x, p, *args)
    dim, keepdim = [*args, None, False][:2]
    # Norms over all dimensions are written as norms over none of them. torch_xla refuses another type.
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


def _max_pool(
    x: torch.Tensor,
    sizes: Sequence[int],
    strides: Sequence[int] = (),
    paddings: Sequence[int] = (0,),
    dilations: Sequence[int] = (1,),
    ceil_mode: bool = False,
    *,
    dims: int,
) -> torch.Tensor:
    # torch_xla's own passes over dilations, and its gradient has none. The program is the same.
    with_indices = getattr(torch.ops.aten, f"max_pool{dims}d_with_indices")
    values: torch.Tensor = with_indices(x, sizes, strides, paddings, dilations, ceil_mode)[0]
    return values


def _max_pool_backward(
    of_torch_xla: Callable[..., torch.Tensor],
    gradient: torch.Tensor,
    x: torch.Tensor,
    sizes: Sequence[int],
    strides: Sequence[int],
    paddings: Sequence[int],
    dilations: Sequence[int],
    ceil_mode: bool,
    indices: torch.Tensor,
    *,
    dims: int,
) -> torch.Tensor:
    if all(dilation == 1 for dilation in dilations):
        return of_torch_xla(gradient, x, sizes, strides, paddings, dilations, ceil_mode, indices)
    # The indices count the elements of an image.
    images = x.new_zeros([*x.shape[:-dims], math.prod(x.shape[-dims:])])
    flat = [*gradient.shape[:-dims], math.prod(gradient.shape[-dims:])]
    indices, gradient = torch.view_copy(indices, flat), torch.view_copy(gradient, flat)
    return torch.view_copy(images.scatter_add(-1, indices, gradient), x.shape)


def _nll_loss(
    of_torch_xla: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    x: torch.Tensor,
    target: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dim() > 1:
        return of_torch_xla(x, target, *options)
    # torch_xla reads the classes where it has the records, and ends the process.
    loss, weight = of_torch_xla(_batch_of(x), _batch_of(target), *options)
    return torch.view_copy(loss, []), weight


def _nll_loss_backward(
    of_torch_xla: Callable[..., torch.Tensor],
    gradient: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    *options: Any,
) -> torch.Tensor:
    if x.dim() > 1:
        return of_torch_xla(gradient, x, target, weight, reduction, *options)
    gradient = gradient if reduction else _batch_of(gradient)
    found = of_torch_xla(gradient, _batch_of(x), _batch_of(target), weight, reduction, *options)
    return torch.view_copy(found, x.shape)


def _batch_of(x: torch.Tensor) -> torch.Tensor:
    return torch.unsqueeze_copy(x, 0)


def _abs(of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    found = of_torch_xla(x)
    # torch_xla says that it is complex.
    return found.to(x.dtype.to_real()) if x.is_complex() else found


def _quotient(
    of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor | complex, divisor: torch.Tensor | complex
) -> torch.Tensor:
    if not isinstance(divisor, torch.Tensor):
        # torch passes a number without its tensor, which torch_xla wants.
        by_number: torch.Tensor = torch.ops.aten.div.Scalar(x, divisor)
        return by_number
    dtype = torch.result_type(x, divisor)
    if dtype.is_complex:
        # torch_xla's own drops the imaginary part.
        return x * divisor.reciprocal()
    return of_torch_xla(x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=dtype), divisor)


def _quotient_by_number(
    of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor, divisor: complex
) -> torch.Tensor:
    dtype = torch.result_type(x, divisor)
    return (
        x * torch.tensor(divisor, dtype=dtype).reciprocal() if dtype.is_complex else of_torch_xla(x, divisor)
    )


def _rounded_quotient(
    of_torch_xla: Callable[..., torch.Tensor], x: Any, divisor: Any, *, rounding_mode: str | None
) -> torch.Tensor:
    if rounding_mode is None:
        return torch.div(x, divisor)
    dtype = torch.result_type(x, divisor)
    # torch computes in more digits, also those of a number that divides.
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    x = x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=dtype)
    divisor = divisor if isinstance(divisor, torch.Tensor) else torch.tensor(divisor, dtype=wide)
    x, divisor = x.to(wide), divisor.to(wide)
    if rounding_mode == "floor" and dtype.is_floating_point:
        return _floor_of_quotient(x, divisor).to(dtype)
    return of_torch_xla(x, divisor, rounding_mode=rounding_mode).to(dtype)


def _floor_of_quotient(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Return what Python's ``//`` does: a quotient may be rounded up to an integer, but not its floor.

    Source: torch 2.9, ``c10/util/generic_math.h``.
    """
    rest = torch.fmod(x, divisor)
    whole = (x - rest) / divisor
    whole = torch.where((rest != 0) & ((divisor < 0) != (rest < 0)), whole - 1, whole)
    floor = torch.floor(whole)
    floor = torch.where(whole - floor > 0.5, floor + 1, floor)
    floor = torch.where(whole == 0, torch.copysign(0 * whole, x / divisor), floor)
    return torch.where(divisor == 0, x / divisor, floor)


def _compared(of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor, number: complex) -> torch.Tensor:
    # torch_xla compares with the number of 64 bits, which few numbers of fewer bits are equal to.
    if isinstance(number, float) and x.is_floating_point() and x.dtype != torch.float64:
        number = torch.tensor(number, dtype=x.dtype).item()
    return of_torch_xla(x, number)


def _threshold(x: torch.Tensor, threshold: float, value: float) -> torch.Tensor:
    return torch.where(_wide(x) <= threshold, value, x)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return the numbers as torch compares them with those of an operator's arguments."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _batch_norm(
    of_torch_xla: Callable[..., tuple[torch.Tensor, ...]],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    is_training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    if mean is None or variance is None:
        return of_torch_xla(x, weight, bias, mean, variance, is_training, momentum, eps)
    if is_training and {mean.device, variance.device} != {x.device}:
        # torch_xla moves copies of them.
        raise RuntimeError(
            f"batch norm computes on {x.device}, but its running statistics are on {mean.device}; "
            "move the whole module to the device"
        )
    # torch_xla's own would be of the type of `x`, which XLA does not mix with that of the statistics, and
    # says that its result has the type of `x` also where it has that of the statistics.
    weight = torch.ones_like(mean) if weight is None else weight
    bias = torch.zeros_like(mean) if bias is None else bias
    count = x.numel() // max(1, mean.numel())
    kept = variance * (1 - momentum) if is_training and count > 1 else None
    wide = x.to(torch.promote_types(x.dtype, mean.dtype))
    y, *saved = of_torch_xla(wide, weight, bias, mean, variance, is_training, momentum, eps)
    if kept is not None:
        # torch_xla adds the variance of these numbers; torch estimates that of all.
        variance.copy_(variance + (variance - kept) / (count - 1))
    return y.to(x.dtype), *saved


def _batch_norm_gradients(
    of_torch_xla: Callable[..., tuple[torch.Tensor, ...]],
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    used_mean: torch.Tensor | None,
    used_inverse: torch.Tensor | None,
    is_training: bool,
    eps: float,
    wanted: list[bool],
) -> tuple[torch.Tensor, ...]:
    if weight is None and mean is not None:
        weight = torch.ones_like(mean)
    given = gradient, x, weight, mean, variance
    if is_training or mean is None or variance is None:
        return of_torch_xla(*given, used_mean, used_inverse, is_training, eps, wanted)
    # torch_xla expects what a training saves. The statistics are constants, so x is only scaled.
    _, *of_parameters = of_torch_xla(*given, mean, torch.rsqrt(variance + eps), True, eps, wanted)
    zeros = torch.zeros_like(mean)
    scaled = torch.native_batch_norm(gradient, weight, zeros, zeros, variance, False, 0.0, eps)[0]
    return scaled, *of_parameters


def _prelu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, weight * x)


def _prelu_gradients(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.where(x > 0, gradient, weight * gradient), torch.where(x > 0, 0, x * gradient)


def _tanh_gradient(
    of_torch_xla: Callable[..., torch.Tensor], gradient: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    return gradient * (1 - y * y).conj_physical() if y.is_complex() else of_torch_xla(gradient, y)


def _sigmoid_gradient(
    of_torch_xla: Callable[..., torch.Tensor], gradient: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    return gradient * (y - y * y).conj_physical() if y.is_complex() else of_torch_xla(gradient, y)


def _einsum(
    of_torch_xla: Callable[..., torch.Tensor], equation: str, tensors: list[torch.Tensor], **path: Any
) -> torch.Tensor:
    if _is_transformed() or any(x.is_complex() for x in tensors):
        # torch_xla's own does not conjugate gradients, and neither torch.func nor forward mode takes a
        # function with its own.
        return _einsum_of_torch(equation, tensors, **path)
    product: Any = _Einsum.apply(of_torch_xla, equation, path, *tensors)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", product)


def _einsum_of_torch(equation: str, tensors: Sequence[torch.Tensor], **path: Any) -> torch.Tensor:
    """Return what other operators compute, which have every gradient."""
    product: torch.Tensor = torch.ops.aten.einsum.default.decompose(equation, tensors, **path)
    return product


def _is_transformed() -> bool:
    """Return whether torch.func or forward mode differentiates."""
    return bool(torch._C._functorch.peek_interpreter_stack()) or forward_ad._current_level >= 0


def _slogdet(
    of_torch_xla: Callable[..., tuple[torch.Tensor, ...]], matrix: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    if not _is_transformed() and not (torch.is_grad_enabled() and matrix.requires_grad):
        return of_torch_xla(matrix)
    # torch_xla leaves out the factors, of which torch computes the gradient.
    factors, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    diagonal = torch.diagonal(factors, dim1=-2, dim2=-1)
    swaps = pivots != torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)
    sign = diagonal.sgn().prod(-1) * (1 - 2 * (swaps.sum(-1) % 2))
    return sign, diagonal.abs().log().sum(-1), factors, pivots


class _Einsum(torch.autograd.Function):
    """torch_xla's own, and a gradient that has a gradient if one is asked for, which torch_xla's has not."""

    @staticmethod
    def forward(
        ctx: Any,
        of_torch_xla: Callable[..., torch.Tensor],
        equation: str,
        path: dict[str, Any],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.options = of_torch_xla, equation, path
        return of_torch_xla(equation, tensors, **path)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_torch_xla, equation, path = ctx.options
        is_wanted = ctx.needs_input_grad[3:]
        has_gradient = torch.is_grad_enabled()
        with torch.enable_grad():
            # The same tensor may be given twice. XLA computes the product once, or not at all.
            tensors = [
                x.view_as(x) if has_gradient else x.detach().requires_grad_(is_one)
                for x, is_one in zip(ctx.saved_tensors, is_wanted, strict=True)
            ]
            product = (_einsum_of_torch if has_gradient else of_torch_xla)(equation, tensors, **path)
        wanted = [x for x, is_one in zip(tensors, is_wanted, strict=True) if is_one]
        found = iter(torch.autograd.grad(product, wanted, gradient, create_graph=has_gradient))
        return (None, None, None, *(next(found) if is_one else None for is_one in is_wanted))


def _native_dropout(x: torch.Tensor, p: float, is_training: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if is_training is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.bernoulli(torch.full_like(x, 1 - p))
    return x * kept * (1 / (1 - p) if p < 1 else 0), kept.bool()


def _hardtanh_gradient(
    gradient: torch.Tensor, x: torch.Tensor, low: float = -1, high: float = 1
) -> torch.Tensor:
    wide = _wide(x)
    return torch.where((wide <= low) | (wide >= high), 0, gradient)


def _hardsigmoid_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where((x > -3) & (x < 3), gradient / 6, 0)


def _hardswish_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    inside = torch.where(x <= -3, 0, gradient * (x / 3 + 0.5))
    return torch.where(x < 3, inside, gradient)


def _reduction(
    of_torch_xla: Callable[..., Any],
    x: torch.Tensor,
    dim: list[int] | None = None,
    *args: Any,
    **named: Any,
) -> Any:
    return of_torch_xla(x, _whole(x, dim), *args, **named)


def _vector_norm(
    of_torch_xla: Callable[..., torch.Tensor],
    x: torch.Tensor,
    order: float = 2,
    dim: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    x = x if dtype is None else x.to(dtype)
    # The norms of complex numbers are real.
    x = x.abs() if x.is_complex() else x
    if math.isfinite(order):
        return of_torch_xla(x, order, _whole(x, dim), keepdim)
    extreme = torch.amax if order > 0 else torch.amin
    return extreme(x.abs(), dim or (), keepdim)


def _logsumexp(
    of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor, dim: list[int], keepdim: bool = False
) -> torch.Tensor:
    dim = dim or [*range(x.dim())]
    if not x.is_floating_point() or not x.numel():
        return of_torch_xla(x, dim, keepdim)
    most = torch.amax(x, dim, keepdim=True)
    # Infinity less infinity is NaN.
    most = torch.where(most.isinf(), 0, most)
    total = torch.log(torch.exp(x - most).sum(dim, keepdim=True)) + most
    return total if keepdim else torch.squeeze_copy(total, dim)


def _nan_to_num(
    of_torch_xla: Callable[..., torch.Tensor],
    x: torch.Tensor,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> torch.Tensor:
    if not x.is_floating_point():
        return of_torch_xla(x, nan, posinf, neginf)
    # torch_xla takes those of float32, which are infinite in bfloat16.
    ends = torch.finfo(x.dtype)
    return of_torch_xla(
        x, nan, ends.max if posinf is None else posinf, ends.min if neginf is None else neginf
    )


def _extreme(
    of_torch_xla: Callable[..., torch.Tensor],
    x: torch.Tensor,
    dim: list[int] | None = None,
    keepdim: bool = False,
) -> torch.Tensor:
    if x.dim() == 0:
        return x.clone()
    extreme: torch.Tensor = _of_halves(of_torch_xla, x, dim or [*range(x.dim())], keepdim)
    return extreme


def _of_halves(of_torch_xla: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
    """Return what torch_xla finds among the halves, twice: the same, but for infinities.

    torch_xla also compares with the lowest, or largest, finite number, and of infinities alone returns that.
    Twice that is an infinity, and no half of a number reaches it. The halves are exact but for numbers that
    XLA takes for 0, which float16 does not have in float32.
    """
    if not x.is_floating_point():
        return of_torch_xla(x, *args)
    found = of_torch_xla((x.float() if x.dtype == torch.float16 else x) / 2, *args)
    values, *indices = [found] if isinstance(found, torch.Tensor) else found
    values = (values * 2).to(x.dtype)
    return (values, *indices) if indices else values


def _whole(x: torch.Tensor, dim: list[int] | None) -> list[int] | None:
    """Return all dimensions in the place of none, which torch takes for all."""
    return [*range(x.dim())] if dim is not None and not len(dim) else dim


def _svd(
    of_torch_xla: Callable[..., Any],
    x: torch.Tensor,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    u, s, vh = of_torch_xla(x, full_matrices, compute_uv, driver=driver)
    if x.dim() > 2:
        # Of several matrices, torch_xla transposes the first two dimensions of V, and takes the singular
        # values for those of one matrix. In XLA's program, the expansion changes nothing.
        s = torch.expand_copy(s, [*x.shape[:-2], *s.shape])
        vh = torch.transpose_copy(torch.transpose_copy(vh, 0, 1), -2, -1) if compute_uv else vh
    return u, s, vh


def _inverse(
    of_torch_xla: Callable[..., Any], x: torch.Tensor, *options: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.is_complex():
        # torch_xla's own is wrong. Complex numbers are real matrices: a + bi is [[a, -b], [b, a]].
        real, imag = (torch.select_copy(torch.view_as_real_copy(x), -1, part) for part in (0, 1))
        rows = torch.cat([real, -imag], -1), torch.cat([imag, real], -1)
        whole, _ = of_torch_xla(torch.cat(rows, -2), *options, **named)
        size = x.shape[-1]
        left = whole.narrow_copy(-1, 0, size)
        inverse = torch.complex(left.narrow_copy(-2, 0, size), left.narrow_copy(-2, size, size))
    else:
        inverse, _ = of_torch_xla(x, *options, **named)
    # One number for each matrix. XLA does not say whether it has an inverse.
    return inverse, torch.zeros(x.shape[:-2], dtype=torch.int32, device=x.device)


def _count_nonzero(
    _: Callable[..., torch.Tensor], x: torch.Tensor, dim: int | list[int] | None = None
) -> torch.Tensor:
    return (x != 0).sum(None if dim == [] else dim)


def _pdist(of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor, p: float = 2) -> torch.Tensor:
    if p != 0 and math.isfinite(p):
        return of_torch_xla(x, p)
    first, second = (indices.to(x.device) for indices in torch.triu_indices(len(x), len(x), 1))
    between = (x.index_select(0, first) - x.index_select(0, second)).abs()
    return between.amax(-1) if p else (between != 0).sum(-1).to(x.dtype)


def _of_one_type(
    of_torch_xla: Callable[..., torch.Tensor], *args: Any, first: int = 0, is_float: bool = False
) -> torch.Tensor:
    """Return what torch_xla computes of two operands of one type, which are at `first`.

    torch_xla gives the result the type of one of them, or mixes types. Like a GPU, this function takes
    operands without dimensions from the CPU. With `is_float`, integers become floating-point numbers.
    """
    x, y = args[first : first + 2]
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        is_same = x.dtype == y.dtype and (x.is_floating_point() or not is_float)
        if is_same and x.device == y.device == args[0].device:
            return of_torch_xla(*args)
    dtype = torch.result_type(x, y)
    if is_float and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    device = next(z.device for z in args if isinstance(z, torch.Tensor) and z.device.type == "xla")
    given = [z.to(device) if isinstance(z, torch.Tensor) and z.dim() == 0 else z for z in args]
    # torch passes a number without its tensor.
    given[first : first + 2] = (
        z.to(dtype) if isinstance(z, torch.Tensor) else torch.full((), z, dtype=dtype, device=device)
        for z in given[first : first + 2]
    )
    return of_torch_xla(*given)


def _of_first_type(of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any) -> torch.Tensor:
    # torch_xla leaves out a weight on the CPU.
    others = (y.to(x.device, x.dtype) if isinstance(y, torch.Tensor) else y for y in args)
    return of_torch_xla(x, *others)


def _clamp(
    x: torch.Tensor, low: torch.Tensor | None = None, high: torch.Tensor | None = None
) -> torch.Tensor:
    # torch_xla leaves out a limit on the CPU.
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


def _copy(
    of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor, source: torch.Tensor, *args: Any
) -> torch.Tensor:
    # Between host and device, torch_xla gives `x` the shape of its source.
    return of_torch_xla(x, source if source.shape == x.shape else torch.expand_copy(source, x.shape), *args)


def _is_nan(of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.ne(x, x) if x.is_complex() else of_torch_xla(x)


def _mean(
    of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None
) -> torch.Tensor:
    # torch_xla rounds to this type afterwards, and knows no mean of integers.
    x = x if dtype is None else x.to(dtype)
    return _reduction(of_torch_xla, x, *args) if args else of_torch_xla(x)


def _index_along(
    of_torch_xla: Callable[..., torch.Tensor],
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    **named: Any,
) -> torch.Tensor:
    if dim == 0 or x.dim() < 2:
        return of_torch_xla(x, dim, index, source, **named)
    # The hash has no dimension, but those of the transposed operands.
    x, source = (torch.transpose_copy(operand, 0, dim) for operand in (x, source))
    return torch.transpose_copy(of_torch_xla(x, 0, index, source, **named), 0, dim)


def _roll(of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor, *shifts: Any) -> torch.Tensor:
    # torch_xla divides by the number of elements, and ends the process.
    return of_torch_xla(x, *shifts) if x.numel() else x.clone()


def _pixel_shuffle(of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor, factor: int) -> torch.Tensor:
    if x.dim() < 3 or factor < 1 or x.shape[-3] % factor**2:
        # An error.
        return of_torch_xla(x, factor)
    *lead, channels, height, width = x.shape
    channels //= factor**2
    parts = torch.view_copy(x, [*lead, channels, factor, factor, height, width])
    rank = len(lead)
    order = [*range(rank), *(rank + dim for dim in (0, 3, 1, 4, 2))]
    return torch.view_copy(
        torch.permute_copy(parts, order), [*lead, channels, height * factor, width * factor]
    )


def _as_strided_scatter(
    _: Callable[..., torch.Tensor],
    x: torch.Tensor,
    source: torch.Tensor,
    sizes: Sequence[int],
    strides: Sequence[int],
    offset: int | None = None,
) -> torch.Tensor:
    places = torch.tensor(offset or 0)
    for size, stride in zip(sizes, strides, strict=True):
        places = places[..., None] + torch.arange(size) * stride
    flat, values = torch.view_copy(x, [x.numel()]), torch.view_copy(source, [source.numel()])
    return torch.view_copy(flat.index_copy(0, places.flatten().to(x.device), values), x.shape)


def _diagonal(
    of_torch_xla: Callable[..., torch.Tensor], x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    return of_torch_xla(torch.permute_copy(x, _with_last(x.dim(), dim1, dim2)), offset, -2, -1)


def _diagonal_scatter(
    of_torch_xla: Callable[..., torch.Tensor],
    x: torch.Tensor,
    diagonal: torch.Tensor,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> torch.Tensor:
    dims = _with_last(x.dim(), dim1, dim2)
    found = of_torch_xla(torch.permute_copy(x, dims), diagonal, offset, -2, -1)
    return torch.permute_copy(found, [dims.index(dim) for dim in range(x.dim())])


def _with_last(rank: int, dim1: int, dim2: int) -> list[int]:
    """Return the dimensions in an order in which these two are the last."""
    last = [dim1 % rank, dim2 % rank]
    return [*(dim for dim in range(rank) if dim not in last), *last]


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
        taps = _linear(x.shape[dim], size, scale, result, dim)
        low, high = (result.index_select(dim, i) * weight for i, weight in taps)
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
            taps = _linear(shape[dim], size, scale, result, dim)
            parts = [(i, result * weight) for i, weight in taps]
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
    length: int, size: int, scale: float, like: torch.Tensor, dim: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the indices of both neighbours of each element along a dimension, with their weights.

    Source: torch 2.9, ``aten/src/ATen/native/UpSample.h``.
    """
    ratio = torch.tensor(1 / scale, dtype=like.dtype)
    there = ((torch.arange(size) + 0.5) * ratio - 0.5).clamp(min=0)
    low = there.floor().long().clamp(max=length - 1)
    high = (low + 1).clamp(max=length - 1)
    # In a shape that fits a batch of images.
    weight = (there - low).clamp(0, 1).reshape([-1, 1] if dim == 2 else [-1])
    return [(i.to(like.device), part.to(like.device)) for i, part in ((low, 1 - weight), (high, weight))]


_COMPOSED = (
    *("cross", "diag", "inverse", "kl_div", "logdet", "qr", "selu", "selu_", "std", "std.dim", "svd"),
)
"""Operators that torch composes of others. torch_xla hides that: torch.func found their gradients to be 0."""
_OWN = {
    "_prelu_kernel": _prelu,
    "_prelu_kernel_backward": _prelu_gradients,
    "elu": _elu,
    "elu_backward": _elu_backward,
    "celu": _celu,
    "native_dropout": _native_dropout,
    "hardtanh_backward": _hardtanh_gradient,
    "hardsigmoid_backward": _hardsigmoid_gradient,
    "hardswish_backward": _hardswish_gradient,
    "floor_divide": functools.partial(torch.div, rounding_mode="floor"),
    "threshold": _threshold,
    "clamp.Tensor": _clamp,
    "clamp_min.Tensor": torch.maximum,
    "clamp_max.Tensor": torch.minimum,
}
"""Operators that need nothing of torch_xla's own."""
_REPLACED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype"), _norm
    ),
    "linalg_vector_norm": _vector_norm,
    "abs": _abs,
    **dict.fromkeys(
        (
            "sum.dim_IntList",
            "std.correction",
            "var.correction",
            "std_mean.correction",
            "var_mean.correction",
        ),
        _reduction,
    ),
    **dict.fromkeys(("mean", "mean.dim"), _mean),
    "logsumexp": _logsumexp,
    **dict.fromkeys(("amax", "amin"), _extreme),
    **dict.fromkeys(("max", "min", "max.dim", "min.dim"), _of_halves),
    **dict.fromkeys(("count_nonzero", "count_nonzero.dim_IntList"), _count_nonzero),
    "div.Tensor": _quotient,
    "div.Scalar": _quotient_by_number,
    "div.Tensor_mode": _rounded_quotient,
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), _batch_norm),
    "native_batch_norm_backward": _batch_norm_gradients,
    "tanh_backward": _tanh_gradient,
    "sigmoid_backward": _sigmoid_gradient,
    "nan_to_num": _nan_to_num,
    "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "_linalg_svd": _svd,
    "linalg_inv_ex": _inverse,
    "_pdist_forward": _pdist,
    **dict.fromkeys(("index_add", "index_copy"), _index_along),
    "pixel_shuffle": _pixel_shuffle,
    "roll": _roll,
    **dict.fromkeys(("copy", "copy_"), _copy),
    "isnan": _is_nan,
    "where.self": functools.partial(_of_one_type, first=1),
    **dict.fromkeys(
        (
            *("maximum", "minimum", "remainder.Tensor", "fmod.Tensor", "pow.Tensor_Tensor"),
            *("mse_loss", "smooth_l1_loss"),
            *(f"{name}.Tensor" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
            *(f"bitwise_{name}.Tensor" for name in ("and", "or", "xor", "left_shift", "right_shift")),
        ),
        _of_one_type,
    ),
    **{f"{name}.Scalar": _compared for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **dict.fromkeys(("atan2", "xlogy.Tensor"), functools.partial(_of_one_type, is_float=True)),
    **dict.fromkeys(
        (
            *("lerp.Tensor", "mse_loss_backward", "smooth_l1_loss_backward"),
            *("binary_cross_entropy", "binary_cross_entropy_backward"),
        ),
        _of_first_type,
    ),
    "as_strided_scatter": _as_strided_scatter,
    "diagonal_copy": _diagonal,
    "diagonal_scatter": _diagonal_scatter,
}
"""Operators that may call torch_xla's own, which they get as their first argument."""
for _dims in (2, 3):
    _REPLACED[f"avg_pool{_dims}d"] = functools.partial(_avg_pool, dims=_dims)
    _REPLACED[f"max_pool{_dims}d_with_indices_backward"] = functools.partial(_max_pool_backward, dims=_dims)
for _mode, _is_nearest in (("nearest", True), ("bilinear", False)):
    _REPLACED[f"upsample_{_mode}2d"] = functools.partial(_interpolated, is_nearest=_is_nearest)
    _REPLACED[f"upsample_{_mode}2d_backward"] = functools.partial(
        _interpolated_backward, is_nearest=_is_nearest
    )
