"""``torch.utils.checkpoint`` with torch_xla, also on a real TPU. Heavy.

torch_xla 2.9.0 leaves it to its own copy of the module: torch's fails with "module 'torch' has no attribute
'xla'", and libraries call torch's. If it did not fail, XLA would take what is computed again for what it has
computed before, and keep that: no memory would be saved.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_map

_DEVICE = "xla"


class _DeviceModule:
    """What torch.utils.checkpoint uses of a module such as ``torch.cuda``.

    Threads: a backward pass computes again in a thread of torch's, whose default device may be another.
    """

    _initialized = True

    def __init__(self) -> None:
        self._entered = threading.local()

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        """Use this device within the block."""
        before, self._entered.index = getattr(self._entered, "index", 0), index
        try:
            yield
        finally:
            self._entered.index = before

    def get_rng_state(self) -> int:
        """Return the seed of the device's next random numbers."""
        return _seed(self._entered.index)

    def set_rng_state(self, seed: int) -> None:
        """Set the seed of the device's next random numbers."""
        _set_seed(self._entered.index, seed)


def _seed(index: int) -> int:
    seed: int = xm.get_rng_state(f"{_DEVICE}:{index}")
    return seed


def _set_seed(index: int, seed: int) -> None:
    xm.set_rng_state(seed, f"{_DEVICE}:{index}")


def _apart(arguments: Any) -> Any:
    """Return a pytree of tensors that XLA does not take for the given ones, although they are equal."""
    found: list[torch.Tensor] = []

    def clone(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != _DEVICE:
            return leaf
        found.append(leaf.clone())
        return found[-1]

    cloned = tree_map(clone, arguments)
    if found:
        xm.optimization_barrier_(found)
    return cloned


def allow_activation_checkpoints() -> None:
    """Have ``torch.utils.checkpoint`` save memory and keep random numbers on XLA's devices, from now on."""
    # Programs may have imported `checkpoint` by its name, which finds these in its module.
    checkpoint: Any = torch_checkpoint
    of_device, frame, reentrant = (
        checkpoint._get_device_module,
        checkpoint._CheckpointFrame,
        checkpoint.CheckpointFunction,
    )
    forward = reentrant.forward
    module = _DeviceModule()

    def forward_apart(ctx: Any, function: Callable[..., Any], *options: Any) -> Any:
        outputs = forward(ctx, function, *options)
        ctx.run_function = _computed_apart(function)
        return outputs

    checkpoint._get_device_module = lambda device="cuda": module if device == _DEVICE else of_device(device)
    checkpoint._CheckpointFrame = lambda again, *options: frame(_computed_apart(again), *options)
    reentrant.forward = staticmethod(forward_apart)
    # The device of a function that gets no tensor. When it is called again, its autocast is the first call's.
    checkpoint.DefaultDeviceType.set_device_type(_DEVICE)
    torch.random.fork_rng = _fork_rng(torch.random.fork_rng)


def _computed_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*_apart(arguments))


def _fork_rng(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(of_torch)
    @contextlib.contextmanager
    def fork_rng(
        devices: Sequence[int] | None = None, enabled: bool = True, *names: str, device_type: str = "cuda"
    ) -> Iterator[None]:
        if device_type != _DEVICE:
            with of_torch(devices, enabled, *names, device_type=device_type):
                yield
            return
        if not enabled:
            yield
            return
        indices = [torch_xla.device().index] if devices is None else devices
        seeds = {index: _seed(index) for index in indices}
        with of_torch([]):
            try:
                yield
            finally:
                for index, seed in seeds.items():
                    _set_seed(index, seed)

    return fork_rng
