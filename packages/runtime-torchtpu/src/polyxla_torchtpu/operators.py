"""Operators that TorchTPU 0.2.0 computes without a gradient, and in silence, also on a real TPU. Heavy.

torch makes ``avg_pool1d`` of other operators. TorchTPU has a kernel of its own for it, and none for its
gradient: the result requires no gradient, and what is before it is not trained.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.nn import functional as F

_library = torch.library.Library("aten", "IMPL")


@functools.cache
def replace() -> None:
    """Compute them with a gradient from now on."""
    _library.impl("avg_pool1d", _avg_pool1d, "AutogradPrivateUse1")


def _avg_pool1d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> torch.Tensor:
    plane = F.avg_pool2d(
        x.unsqueeze(-2),
        [1, *kernel_size],
        [1, *(stride or kernel_size)],
        [0, *padding],
        ceil_mode,
        count_include_pad,
    )
    return plane.squeeze(-2)
