"""Floating-point operations of a call, from the shapes of its arguments and its result.

Counted are linear, matmul and its variants, einsum of two operands, convolutions, attention and recurrent
networks. A multiplication and an addition are two operations; other functions are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

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
    matrices = [one for value in values if isinstance(value, list | tuple) for one in _tensors(value)]
    weights = sum(one.numel() for one in matrices if one.dim() == 2)
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
