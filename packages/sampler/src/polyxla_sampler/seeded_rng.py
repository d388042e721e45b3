"""Drawing from random generators that are seeded for the purpose, and leaving them as they were."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")


def seeded(items: Callable[[], Iterable[Item]], seed: int, block: int) -> Iterator[Item]:
    """Iterate over ``items()`` as if the process's generators had been seeded for it.

    torch's generator of the CPU, `random`'s and, where numpy is loaded, its global one are exchanged while
    a block is drawn and put back after it, so that nobody else's draws are changed. Not while other threads
    draw from them: what they get in that time is not theirs.

    Args:
        items: makes the iterable, whose draws come from the seed as well.
        seed: 63 bits.
        block: number of items drawn at a time, between two exchanges.
    """
    others = _states()
    seed_generators(seed)
    try:
        iterator = iter(items())
        drawn = list(islice(iterator, block))
    finally:
        own = _exchange(others)
    while drawn:
        yield from drawn
        others = _exchange(own)
        try:
            drawn = list(islice(iterator, block))
        finally:
            own = _exchange(others)


def with_generator(sampler: Any, seed: int) -> Any:
    """Return `sampler`, copied where it or what it wraps has a `generator`, which is then a seeded one."""
    if getattr(sampler, "sampler", None) is not None:
        inner = with_generator(sampler.sampler, seed)
        if inner is not sampler.sampler:
            sampler = copy.copy(sampler)
            sampler.sampler = inner
    if hasattr(sampler, "generator"):
        sampler = copy.copy(sampler)
        sampler.generator = torch.Generator().manual_seed(seed)
    return sampler


def seed_generators(seed: int) -> None:
    """Seed torch's generator of the CPU, `random`'s and, where it is loaded, numpy's."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _states() -> tuple[Any, Any, Any]:
    numpy = sys.modules.get("numpy")
    return torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()


def _exchange(states: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Put `states` in place and return those that were there."""
    before = _states()
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    # numpy may have been loaded meanwhile: then there is nothing to put back.
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
    return before
