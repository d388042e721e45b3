"""Random generators that are seeded for one iteration and restored afterwards."""

from __future__ import annotations

import copy
import hashlib
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")

# Replicas that are threads share the process's generators. Without turns, one would draw from another's, each
# replica would divide another order of the records, and some records would be read twice, others never.
# Reentrant: what is drawn may itself be drawn from a seeded iterable.
_exchanging = threading.RLock()


def derive_seed(*parts: int) -> int:
    """Return a seed of 63 bits that depends on every part and on their order.

    `polyxla.replica.random_state` derives seeds too. This package works without polyxla, so it may not
    import that function; and saved positions depend on these seeds, so they must not change.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def iterate_seeded(items: Callable[[], Iterable[Item]], seed: int, block: int) -> Iterator[Item]:
    """Iterate over ``items()`` as if the process's generators had been seeded for it.

    The generators are torch's for the CPU, `random`'s and, if numpy is imported, numpy's global one. They
    are replaced while a block is drawn and restored after it, so other code draws the same numbers as
    without this. Replicas that are threads of one process take turns. While they are replaced, other code
    in another thread must not draw from them.

    Args:
        items: makes the iterable; what it draws is seeded too.
        seed: 63 bits.
        block: number of items drawn at a time, between two exchanges of the generators.
    """
    with _exchanging:
        others = _states()
        seed_generators(seed)
        try:
            iterator = iter(items())
            drawn = list(islice(iterator, block))
        finally:
            own = _exchange(others)
    while drawn:
        yield from drawn
        with _exchanging:
            others = _exchange(own)
            try:
                drawn = list(islice(iterator, block))
            finally:
                own = _exchange(others)


def with_generator(sampler: Any, seed: int) -> Any:
    """Return a copy of `sampler` whose `generator`, at any depth, is a seeded one.

    A sampler without a generator is returned itself.
    """
    if getattr(sampler, "sampler", None) is not None:
        inner = with_generator(sampler.sampler, seed)
        if inner is not sampler.sampler:
            sampler = copy.copy(sampler)
            sampler.sampler = inner
    # A copy: the user's sampler keeps its generator, which it may share with other code.
    if hasattr(sampler, "generator"):
        sampler = copy.copy(sampler)
        sampler.generator = torch.Generator().manual_seed(seed)
    return sampler


def seed_generators(seed: int) -> None:
    """Seed torch's generator of the CPU, `random`'s and, if it is imported, numpy's."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        # numpy accepts seeds of 32 bits.
        numpy.random.seed(seed % 2**32)


def _states() -> tuple[Any, Any, Any]:
    numpy = sys.modules.get("numpy")
    return torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()


def _exchange(states: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Set the generators to `states` and return the states that they had."""
    before = _states()
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    # If numpy was imported since `states` was taken, there is nothing to restore.
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
    return before
