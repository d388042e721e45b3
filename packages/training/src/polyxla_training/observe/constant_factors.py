"""Factors of an optimizer that have become constants of its program, which was compiled again for that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_DECOUPLED = ("AdamW", "Adafactor", "Muon")


def constant_factors(optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    """Yield a sentence for each factor that is 1 in float32, which torch_xla makes a constant.

    `polyxla.Replica.step` keeps them inputs; a loop that calls ``optimizer.step()`` itself does not.
    """
    if optimizer is None:
        return
    # Here, because it imports torch, which `polyxla report` does not need.
    from polyxla.plugin import HALF_STEP, correction_is_one

    name = type(optimizer).__name__
    advice = "now 1 in float32, and so a constant of the program; replica.step(optimizer) keeps it an input"
    for group in optimizer.param_groups:
        rate, decay = group.get("lr"), group.get("weight_decay")
        is_decoupled = group.get("decoupled_weight_decay") or name in _DECOUPLED
        product = rate * decay if isinstance(rate, float) and isinstance(decay, float) else 0.0
        if is_decoupled and 0 < product <= HALF_STEP:
            yield f"{name}'s factor 1 - lr * weight_decay is {advice}"
        if correction_is_one(optimizer, group):
            yield f"{name}'s factor sqrt(1 - beta2 ** step) is {advice}"
