"""The contexts that policies are made of. All are of the thread that enters them.

Replicas may be threads of one process, and a loader's threads make tensors meanwhile: torch's default
dtype is the whole process's and is never set here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Floating-point whatever their arguments are.
_FLOATING = frozenset(
    {
        torch.bartlett_window,
        torch.blackman_window,
        torch.empty,
        torch.empty_permuted,
        torch.empty_strided,
        torch.eye,
        torch.hamming_window,
        torch.hann_window,
        torch.kaiser_window,
        torch.linspace,
        torch.logspace,
        torch.ones,
        torch.rand,
        torch.randn,
        torch.zeros,
    }
)
# Floating-point if they are given Python's floats.
_INFERRED = frozenset(
    {
        torch.arange,
        torch.as_tensor,
        torch.asarray,
        torch.full,
        torch.normal,
        torch.scalar_tensor,
        torch.tensor,
    }
)


class DefaultDtype(TorchFunctionMode):
    """In this thread, tensors made without a dtype are of `dtype` where they would be floating-point.

    As torch.set_default_dtype, but for what torch's factory functions make: the quotient of two
    integer tensors, ``torch.Tensor(2, 3)`` and what torch.get_default_dtype() returns do not change.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_open = kwargs.get("dtype") is None and kwargs.get("out") is None
        if is_open and (func in _FLOATING or (func in _INFERRED and _is_inferred(args, kwargs))):
            kwargs = {**kwargs, "dtype": self.dtype}
        return func(*args, **kwargs)


def _is_inferred(args: Any, kwargs: Mapping[str, Any]) -> bool:
    values = [*args, *kwargs.values()]
    return not any(isinstance(one, torch.Tensor) for one in values) and any(map(_has_float, values))


def _has_float(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_float, value))
    # NumPy's float64 is a float too, but one with a dtype.
    return isinstance(value, float) and not hasattr(value, "dtype")


class Autocast:
    """In this thread, compute matrix products and convolutions in bfloat16, or in what they are given.

    Casts of weights are not kept for the next use: torch would hand one that was made under no_grad to
    a forward that needs its gradient, which is then missing without a word. XLA computes equal casts once.
    """

    def __init__(self, *, enabled: bool) -> None:
        # Both, since eager torch computes on one and torch_xla on the other; it need not be imported.
        # Two fields, not an ExitStack: this is entered every step, and again by every kept module.
        self._cpu, self._xla = (
            torch.autocast(kind, torch.bfloat16, enabled, cache_enabled=False) for kind in ("cpu", "xla")
        )

    def __enter__(self) -> None:
        self._cpu.__enter__()
        self._xla.__enter__()

    def __exit__(self, *error: object) -> None:
        self._xla.__exit__(*error)
        self._cpu.__exit__(*error)
