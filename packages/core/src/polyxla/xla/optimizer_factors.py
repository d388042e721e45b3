"""Keeping an optimizer's factors inputs of its program, also when they become 1 in float32.

torch_xla makes constants of the Python numbers 0, 1 and -1, and inputs of all others. Two factors of Adam
and its relatives become 1: ``1 - lr * weight_decay`` when a schedule decays, and ``sqrt(1 - beta2 ** step)``
in a long run (with beta2 = 0.95 after 324 steps). That step would compile another program. So while
``optimizer.step()`` runs, the optimizer's groups hold numbers that compute a tensor for the first factor, and
the float32 below 1 for the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

HALF_STEP = 2.0**-25
"""The largest x for which ``1 - x`` is 1 in float32."""
MAX_TENSORS = 64
"""Number of factors to keep on the device: more than an optimizer has groups."""


def correction_is_one(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Return whether ``sqrt(1 - beta2 ** step)`` is 1 in float32 in the coming step of a group."""
    betas = group.get("betas")
    if not isinstance(betas, tuple) or len(betas) < 2 or type(betas[1]) is not float:
        return False
    states = (optimizer.state[parameter] for parameter in group["params"] if parameter in optimizer.state)
    state: Mapping[str, Any] = next(states, {})
    steps = state.get("step", 0)
    # A step count on the device is part of the program.
    is_on_host = isinstance(steps, int | float) or steps.device.type == "cpu"
    return is_on_host and bool(betas[1] ** (float(steps) + 1) < 2 * HALF_STEP)


class FactorTensors:
    """The factors of the latest steps as tensors on the device.

    Args:
        upload: copies a tensor to the device, into a buffer of its own.
    """

    def __init__(self, upload: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._upload = upload
        self._tensors: dict[float, torch.Tensor] = {}

    def __call__(self, factor: float) -> torch.Tensor:
        """Return the tensor of `factor`, float32 without dimensions; uploaded if no recent step had it."""
        found = self._tensors.get(factor)
        if found is None:
            if len(self._tensors) >= MAX_TENSORS:
                # A schedule brings new factors with each step, and old ones seldom come again.
                self._tensors.clear()
            found = self._tensors[factor] = self._upload(torch.tensor(factor, dtype=torch.float32))
        return found


@contextlib.contextmanager
def factors_as_inputs(optimizer: torch.optim.Optimizer, tensors: FactorTensors) -> Iterator[None]:
    """Keep the factors inputs while ``optimizer.step()`` runs.

    Args:
        optimizer: its groups are changed, and restored at the end.
        tensors: return factors as tensors on its device.
    """
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group in optimizer.param_groups:
        changed: dict[str, Any] = {}
        if _decays(group):
            changed["weight_decay"] = decay = _Decay(group["weight_decay"])
            decay.tensors = tensors
        if correction_is_one(optimizer, group):
            first, second, *others = group["betas"]
            changed["betas"] = (first, _Beta(second), *others)
        if changed:
            before.append((group, {name: group[name] for name in changed}))
            group.update(changed)
    try:
        yield
    finally:
        for group, values in before:
            group.update(values)


def _decays(group: dict[str, Any]) -> bool:
    rate, decay = group.get("lr"), group.get("weight_decay")
    is_known = type(rate) is float and type(decay) is float and rate * decay > 0
    # A float64 parameter needs the factor with all digits.
    return is_known and all(parameter.dtype != torch.float64 for parameter in group["params"][:1])


class _Decay(float):
    """A weight decay; its product with a learning rate, taken from 1, is a tensor."""

    tensors: FactorTensors

    def __rmul__(self, rate: float) -> float:
        product = _Product(rate * float(self))
        product.tensors = self.tensors
        return product


class _Product(float):
    tensors: FactorTensors

    def __rsub__(self, number: float) -> Any:
        return self.tensors(number - float(self))


class _Beta(float):
    """A coefficient whose powers keep ``sqrt(1 - beta ** step)`` at the float32 below 1."""

    def __pow__(self, exponent: float, modulus: None = None) -> Any:
        # The root of 1 - 2**-23 rounds to 1 - 2**-24, which is the float32 below 1.
        return max(float(self) ** exponent, 4 * HALF_STEP)
