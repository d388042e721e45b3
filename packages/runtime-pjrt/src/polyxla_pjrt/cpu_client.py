"""Seeing the first tensor on torch_xla's own client for the CPU, which starts inside C++ without a plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from polyxla.plugin import first_device_use


class TensorWatch(TorchFunctionMode):
    """Reports the first call of torch with ``"xla"`` as a device to `polyxla.xla.first_device_use`.

    It sees every call of torch in the main thread until then, so it is only for processes that may launch
    several replicas: these compute nothing themselves.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, after reporting a device."""
        given = kwargs or {}
        if any(_is_xla(one) for one in (*args, given.get("device"))):
            first_device_use.before_use()
        return func(*args, **given)

    def stop(self) -> None:
        """See no more calls; a mode that the program has entered since stays, and this one below it."""
        if torch.overrides._get_current_function_mode() is self:
            self.__exit__(None, None, None)


def _is_xla(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "xla"
    return isinstance(value, str) and value.partition(":")[0] == "xla"
