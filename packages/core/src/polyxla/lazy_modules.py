"""Lazy modules, which infer their shapes from the first batch. Heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy


def keep_lazy_parameters() -> None:
    """Have lazy modules of this process infer their shapes also after they were moved.

    torch replaces a parameter that is moved to a device of torch_xla or TorchTPU, and writes into one that is
    moved to another kind of device. What replaces a lazy parameter is an ordinary one without numbers.
    """

    def apply(self: Any, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = {**self._parameters, **self._buffers}
        super(LazyModuleMixin, self)._apply(function, recurse)
        for own in (self._parameters, self._buffers):
            for name, tensor in own.items():
                if is_lazy(before[name]) and not is_lazy(tensor):
                    kind = type(before[name])
                    own[name] = kind(tensor.requires_grad, device=tensor.device, dtype=tensor.dtype)
        return self

    LazyModuleMixin._apply = apply  # type: ignore[attr-defined]
