"""The dataset that one replica's steps read, if it reads all records of it."""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from polyxla_training.observe.own_loop.loop_summary import WholeDataset

MAX_ITEMS, MAX_DEPTH = 64, 4
"""What a digest covers: as many items of a sequence, and as deep."""


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
        # By sampler, which the function may drop; what it was used for counts until the end.
        self._by_sampler: MutableMapping[Any, _Use] = weakref.WeakKeyDictionary()
        self._uses: list[_Use] = []
        self._latest: _Use | None = None

    def batch_read(self, iterator: Any) -> None:
        """Record that a DataLoader's iterator reads a batch. Called for every batch."""
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
        # A loop may make a loader for each epoch.
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
        # Elements on a device are not read: that would wait for it.
        on_host = value.reshape(-1) if value.device.type == "cpu" else value.new_empty(0, device="cpu")
        parts += [value.shape, value.dtype, on_host[:: _stride(on_host.numel())].tolist()]
    elif type(value).__module__ == "numpy" and hasattr(value, "reshape"):
        parts += [value.shape, value.dtype, value.reshape(-1)[:: _stride(value.size)].tolist()]
    elif depth < MAX_DEPTH:
        if isinstance(value, list | tuple):
            parts += [len(value), *(_digest(one, depth + 1) for one in value[:: _stride(len(value))])]
        else:
            items = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            chosen = list(items.items())[:MAX_ITEMS]
            parts += [len(items), *((str(name), _digest(one, depth + 1)) for name, one in chosen)]
    return zlib.crc32(repr(parts).encode())


def _stride(length: int) -> int:
    return max(1, length // MAX_ITEMS)
