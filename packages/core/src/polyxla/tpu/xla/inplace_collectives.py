"""torch_xla's collectives that write into their arguments, as operations that torch sees. Heavy.

torch_xla 2.9.0 replaces the value of such an argument behind torch's back. If the argument is a view, the
tensor behind it keeps its old values, and the view has them again after its next in-place operation. So
accumulated gradients that are reduced and then clipped, and gradients in the buckets of
DistributedDataParallel, were those of one replica. Here, a collective writes into a tensor of its own, which
torch then copies. In XLA's program, this adds a copy only where the argument is a view.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch_xla

_WRITTEN = {
    "_xla_all_reduce_inplace": 1,
    "_xla_all_gather_out": 0,
    "_xla_all_gather_coalesced_out": 0,
    "_xla_reduce_scatter_out": 1,
    "_xla_reduce_scatter_coalesced_out": 1,
}
"""Functions of torch_xla's C++ module, with the position of the tensor or list that each writes into."""

_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]


@functools.cache
def replace() -> None:
    """Replace the functions, through which all of torch_xla writes. Several runtimes may call this."""
    for name, position in _WRITTEN.items():
        setattr(_native, name, _copying(getattr(_native, name), position))


def _copying(collective: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*arguments: Any) -> Any:
        given = arguments[position]
        written = [given] if isinstance(given, torch.Tensor) else list(given)
        own = [one.detach().clone() for one in written]
        into = own[0] if isinstance(given, torch.Tensor) else own
        result = collective(*arguments[:position], into, *arguments[position + 1 :])
        with torch.no_grad():
            for one, value in zip(written, own, strict=True):
                one.copy_(value)
        return result

    return call
