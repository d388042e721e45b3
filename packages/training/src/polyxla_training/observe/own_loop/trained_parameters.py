"""Samples of the parameters that one replica trains, by which the launching process compares replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from polyxla.plugin import optimizer_parameters
from polyxla_training.observe.own_loop.loop_summary import SampledParameter

if TYPE_CHECKING:
    from polyxla import Replica
    from polyxla.plugin import Counters

MAX_TENSORS, MAX_ELEMENTS = 8, 1 << 18
"""What is read back of each optimizer's parameters at the end: the smallest ones, with a megabyte at most."""
MAX_VALUES = 64
"""Number of elements of a tensor that are compared."""
ROUNDINGS = 64
"""Difference that rounding may cause in one step, in units of the last place."""


class TrainedParameters:
    """Chooses a few parameters of each optimizer of one replica, and reads them at the end.

    Args:
        replica: the replica.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._chosen: dict[int, dict[str, torch.Tensor]] = {}

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """Choose parameters at the optimizer's first step. Called after every step."""
        if id(optimizer) in self._chosen:
            return
        # An optimizer that wraps another one may give it a part of each parameter, as ZeRO does.
        self._chosen.pop(id(getattr(optimizer, "base_optimizer", None)), None)
        self._chosen[id(optimizer)] = dict(self._choose(optimizer))

    def _choose(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        names, own = self._names()
        trained = [
            (names.get(id(one), f"parameter {number} of {type(optimizer).__name__}"), one)
            for number, one in enumerate(optimizer_parameters(optimizer))
            if one.grad is not None and id(one) not in own and _is_whole(one)
        ]
        elements = 0
        for name, one in sorted(trained, key=lambda pair: pair[1].numel())[:MAX_TENSORS]:
            elements += one.numel()
            if elements > max(MAX_ELEMENTS, one.numel()):
                return
            yield f"{name} {list(one.shape)}", one

    def _names(self) -> tuple[dict[int, str], set[int]]:
        """Return the names of the parameters that were set up, and the ids of those that may differ."""
        names, own = {}, set()
        for module, is_same in self._replica.modules.items():
            for name, one in module.named_parameters():
                names[id(one)] = name
                if not is_same:
                    own.add(id(one))
        return names, own

    def read(self, counters: Counters | None, steps: int) -> tuple[SampledParameter, ...]:
        """Return samples of the chosen parameters, except of those whose last update was not submitted.

        Args:
            counters: tell what was submitted; None if the runtime has no programs.
            steps: number of updates, each of which may have rounded.
        """
        chosen = [pair for one in self._chosen.values() for pair in one.items()]
        return tuple(
            _sample(name, one, steps) for name, one in chosen if not counters or counters.is_submitted(one)
        )


def _is_whole(parameter: Any) -> bool:
    """Return whether this is no shard, which differs between replicas: torch_xla's FSDP marks its shards."""
    is_plain = type(parameter) in {torch.Tensor, torch.nn.Parameter}
    return is_plain and bool(parameter.numel()) and not hasattr(parameter, "_is_sharded")


def _sample(name: str, parameter: torch.Tensor, steps: int) -> SampledParameter:
    whole = parameter.detach().cpu().to(torch.float64).reshape(-1)
    values = whole[:: max(1, whole.numel() // MAX_VALUES)][:MAX_VALUES].tolist()
    scale = whole.nan_to_num().abs().max().item()
    tolerance = torch.finfo(parameter.dtype).eps * ROUNDINGS * math.sqrt(max(1, steps)) * scale
    return SampledParameter(name, tuple(values), tolerance)
