"""Samples of the parameters that one replica trains, and the dataset that its steps read."""

from __future__ import annotations

import math
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from polyxla.plugin import optimizer_parameters
from polyxla_training.observe.own_loop.loop_summary import SampledParameter, WholeDataset

if TYPE_CHECKING:
    from polyxla import Replica
    from polyxla.plugin import Counters

MAX_TENSORS, MAX_ELEMENTS = 8, 1 << 18
"""Limits of what is read back of each optimizer's parameters at the end: a megabyte of the smallest ones."""
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
            (names.get(id(parameter), f"parameter {number} of {type(optimizer).__name__}"), parameter)
            for number, parameter in enumerate(optimizer_parameters(optimizer))
            if parameter.grad is not None and id(parameter) not in own and _is_whole(parameter)
        ]
        elements = 0
        # The smallest first: they are read back at the end, and any parameter shows a missing average.
        for name, parameter in sorted(trained, key=lambda pair: pair[1].numel())[:MAX_TENSORS]:
            elements += parameter.numel()
            if elements > max(MAX_ELEMENTS, parameter.numel()):
                return
            yield f"{name} {list(parameter.shape)}", parameter

    def _names(self) -> tuple[dict[int, str], set[int]]:
        """Return the names of the parameters that were set up, and the ids of those that may differ."""
        names, own = {}, set()
        for module, is_same in self._replica.modules.items():
            for name, parameter in module.named_parameters():
                names[id(parameter)] = name
                if not is_same:
                    own.add(id(parameter))
        return names, own

    def read(self, counters: Counters | None, steps: int) -> tuple[SampledParameter, ...]:
        """Return samples of the chosen parameters, except of those whose last update was not submitted.

        Args:
            counters: tell what was submitted; None if the runtime has no programs.
            steps: number of updates, each of which may have rounded.
        """
        chosen = [pair for parameters in self._chosen.values() for pair in parameters.items()]
        return tuple(
            _sample(name, parameter, steps)
            for name, parameter in chosen
            if not counters or counters.is_submitted(parameter)
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


MAX_ITEMS, MAX_DEPTH = 64, 4
"""Limits of a digest: the items of a sequence, and the depth of nested containers."""


@dataclass
class _Use:
    dataset: WholeDataset | None
    batches: int = 0
    steps: int = 0


class ReadDatasets:
    """Counts which loader's batches one replica's optimizer steps follow.

    A dataset is trained on if at least half of all steps came after its batches, read with gradients enabled,
    and no part of another one was read as often. So an evaluation does not count.
    """

    def __init__(self) -> None:
        # Weak keys: the user's function may drop a sampler. Its use stays in the list, and counts at the end.
        self._by_sampler: MutableMapping[Any, _Use] = weakref.WeakKeyDictionary()
        self._uses: list[_Use] = []
        self._latest: _Use | None = None

    def batch_read(self, iterator: Any) -> None:
        """Record that a DataLoader's iterator reads a batch. Called for every batch."""
        # Evaluations read with gradients disabled, and often read a whole dataset in every replica on
        # purpose.
        if not torch.is_grad_enabled():
            return
        sampler = iterator._index_sampler
        use = self._by_sampler.get(sampler)
        if use is None:
            use = self._by_sampler[sampler] = _Use(_undivided(iterator._dataset, sampler))
            self._uses.append(use)
        use.batches += 1
        self._latest = use

    def step(self) -> None:
        """Record an optimizer step. Called for every step."""
        if self._latest:
            self._latest.steps += 1

    def trained_on(self, steps: int) -> WholeDataset | None:
        """Return the dataset of which the steps read all records; None if they read a part, or others.

        Args:
            steps: number of all steps.
        """
        if any(use.batches * 2 >= steps for use in self._uses if use.dataset is None):
            return None
        # Summed by dataset, because a loop may make a new loader for each epoch.
        found: Counter[WholeDataset] = Counter()
        for use in self._uses:
            if use.dataset is not None:
                found[use.dataset] += use.steps
        return next((dataset for dataset, count in found.items() if count * 2 >= steps), None)


def _undivided(dataset: Any, sampler: Any) -> WholeDataset | None:
    """Return the dataset if its sampler draws all records; None if it does not, or may not.

    Only torch's own samplers are known to; a sampler that divides the records has another class.
    """
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    draws_all = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    if not draws_all or isinstance(dataset, IterableDataset):
        return None
    try:
        return WholeDataset(type(dataset).__name__, len(dataset), _digest(dataset))
    except Exception:
        # A dataset may raise anything when its attributes are read.
        return None


def _digest(value: Any, depth: int = 0) -> int:
    """Return a checksum of what distinguishes two parts of one dataset: indices, names, some elements."""
    parts: list[Any] = [type(value).__qualname__]
    if isinstance(value, str | bytes | int | float | range | None):
        parts.append(repr(value))
    elif isinstance(value, torch.Tensor):
        # Elements on a device are left out: reading them would wait for it.
        on_host = value.reshape(-1) if value.device.type == "cpu" else value.new_empty(0, device="cpu")
        parts += [value.shape, value.dtype, on_host[:: _stride(on_host.numel())].tolist()]
    elif type(value).__module__ == "numpy" and hasattr(value, "reshape"):
        parts += [value.shape, value.dtype, value.reshape(-1)[:: _stride(value.size)].tolist()]
    elif depth < MAX_DEPTH:
        if isinstance(value, list | tuple):
            parts += [len(value), *(_digest(item, depth + 1) for item in value[:: _stride(len(value))])]
        else:
            items = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            chosen = list(items.items())[:MAX_ITEMS]
            parts += [len(items), *((str(name), _digest(item, depth + 1)) for name, item in chosen)]
    return zlib.crc32(repr(parts).encode())


def _stride(length: int) -> int:
    return max(1, length // MAX_ITEMS)
