"""The contexts of the policies. Each affects only the thread that enters it.

Replicas may be threads of one process, and a loader's threads create tensors at the same time. torch's
default dtype belongs to the whole process, so it is never set here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Their result is floating-point for any arguments.
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
# Their result is floating-point if an argument is a Python float.
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
    """In this thread, floating-point tensors created without a dtype have `dtype`.

    Like torch.set_default_dtype, but for torch's factory functions only: the quotient of two integer
    tensors, ``torch.Tensor(2, 3)`` and torch.get_default_dtype() do not change.
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
    return not any(isinstance(value, torch.Tensor) for value in values) and any(map(_has_float, values))


def _has_float(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_float, value))
    # NumPy's float64 is a float too, but one with a dtype.
    return isinstance(value, float) and not hasattr(value, "dtype")


class Autocast:
    """In this thread, compute matrix products and convolutions in bfloat16; if disabled, in their dtype.

    Cast weights are not cached. torch would reuse a cast that was made under no_grad in a forward pass that
    needs a gradient, and the gradient would be missing silently. XLA computes equal casts once anyway.
    """

    def __init__(self, *, enabled: bool) -> None:
        # Both kinds: eager torch computes on "cpu", torch_xla on "xla", which works without importing it.
        # Two fields, not an ExitStack: this is entered in every step, and again by each float32 module.
        self._cpu, self._xla = (
            torch.autocast(kind, torch.bfloat16, enabled, cache_enabled=False) for kind in ("cpu", "xla")
        )

    def __enter__(self) -> None:
        self._cpu.__enter__()
        self._xla.__enter__()

    def __exit__(self, *error: object) -> None:
        self._xla.__exit__(*error)
        self._cpu.__exit__(*error)
