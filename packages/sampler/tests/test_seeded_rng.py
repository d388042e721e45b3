"""Draws that are seeded for one iteration and do not change what other code draws."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from polyxla_sampler.seeded_rng import derive_seed, iterate_seeded, with_generator


def draws() -> Iterator[tuple[float, float, float]]:
    """Draw from all three global generators, forever."""
    while True:
        yield random.random(), torch.rand(()).item(), float(np.random.random())  # noqa: NPY002


def others() -> tuple[float, float, float]:
    return next(draws())


@pytest.mark.parametrize("block", [1, 7])
def test_draws_depend_only_on_the_seed(block: int) -> None:
    expected = list(islice(iterate_seeded(draws, 5, block), 20))
    torch.manual_seed(123)
    mine = []
    for each in islice(iterate_seeded(draws, 5, block), 20):
        others()
        mine.append(each)
    assert mine == expected
    assert list(islice(iterate_seeded(draws, 6, block), 20)) != expected


def test_threads_that_draw_at_once_draw_what_each_draws_alone() -> None:
    def slow_draws() -> Iterator[float]:
        for _ in range(50):
            # The other threads run here, in the middle of a block.
            time.sleep(0.0001)
            yield random.random()

    expected = list(iterate_seeded(slow_draws, 5, 10))
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda _: list(iterate_seeded(slow_draws, 5, 10)), range(8)))
    assert drawn == [expected] * 8


def test_other_code_draws_the_same_numbers() -> None:
    def seed() -> None:
        random.seed(1), torch.manual_seed(1), np.random.seed(1)  # noqa: NPY002

    seed()
    expected = [others() for _ in range(4)]
    seed()
    undisturbed = [others() for _ in islice(iterate_seeded(draws, 9, 2), 4)]
    assert undisturbed == expected


def test_an_error_while_drawing_restores_the_generators() -> None:
    def broken() -> Iterator[float]:
        yield random.random()
        raise RuntimeError("no more")

    random.seed(3)
    expected = random.random()
    random.seed(3)
    with pytest.raises(RuntimeError, match="no more"):
        list(iterate_seeded(broken, 0, 5))
    assert random.random() == expected


def test_a_sampler_is_copied_with_a_seeded_generator_at_any_depth() -> None:
    generator = torch.Generator()
    inner = RandomSampler(range(50), generator=generator)
    batches = BatchSampler(inner, 5, drop_last=False)
    first, again, other = (list(with_generator(batches, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert batches.sampler is inner
    assert inner.generator is generator
    plain = BatchSampler(SequentialSampler(range(4)), 2, drop_last=False)
    assert with_generator(plain, 1) is plain


def test_a_derived_seed_depends_on_each_part_and_their_order() -> None:
    derived = [derive_seed(0, 1), derive_seed(1, 0), derive_seed(0, 1, 0), derive_seed(1), derive_seed(-1)]
    assert len(set(derived)) == 5
    assert all(0 <= seed < 2**63 for seed in derived)
