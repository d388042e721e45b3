"""A shuffled order that is computed instead of kept: it must be one, and look like one."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from itertools import islice, permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyxla_sampler.permutation import BLOCK, LONGEST, NARROW, Permutation, around, derive_seed

seeds = st.integers(-(2**70), 2**70)


def excess(counts: torch.Tensor, degrees: int) -> float:
    """Return how many standard deviations a chi-squared of equal expectations is above its mean."""
    expected = counts.double().mean()
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    return (chi_squared - degrees) / math.sqrt(2 * degrees)


def order(length: int, seed: int, first: int | None = None) -> torch.Tensor:
    return torch.tensor(list(Permutation(length, seed).walk(0, first)))


@given(length=st.integers(0, 3 * BLOCK), seed=seeds)
def test_every_index_comes_once(length: int, seed: int) -> None:
    assert sorted(Permutation(length, seed)) == list(range(length))


def test_every_index_comes_once_in_a_long_order() -> None:
    length = NARROW // 4 - 1
    assert torch.equal(order(length, 5).sort().values, torch.arange(length))


@given(length=st.integers(1, 2 * BLOCK), seed=seeds, start=st.integers(0, 2 * BLOCK), step=st.integers(1, 9))
def test_a_walk_from_anywhere_is_that_part_of_the_whole(
    length: int, seed: int, start: int, step: int
) -> None:
    permutation = Permutation(length, seed)
    assert list(permutation.walk(start, step=step)) == list(permutation)[start::step]
    assert list(permutation.walk(start, start + 50, step)) == list(permutation)[start : start + 50 : step]


@given(length=st.integers(1, LONGEST), seed=seeds, data=st.data())
def test_positions_of_the_longest_orders_have_distinct_indices(
    length: int, seed: int, data: st.DataObject
) -> None:
    permutation = Permutation(length, seed)
    assert len(range(permutation.length)) == length
    start = data.draw(st.integers(0, length - 1))
    some = list(islice(permutation.walk(start), 300))
    assert len(set(some)) == len(some) == min(300, length - start)
    assert 0 <= min(some) <= max(some) < length
    assert [permutation[start], permutation[-1]] == [some[0], permutation[length - 1]]


def test_a_position_that_is_none_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        Permutation(5, 0)[5]
    with pytest.raises(ValueError, match=r"length=-1 .* not between 0 and 2\*\*62"):
        Permutation(-1, 0)
    with pytest.raises(ValueError, match="not between"):
        Permutation(LONGEST + 1, 0)


def test_it_depends_on_the_seed_and_on_nothing_else() -> None:
    torch.manual_seed(0)
    first = list(Permutation(100, 7))
    torch.manual_seed(1)
    assert list(Permutation(100, 7)) == first
    assert list(Permutation(100, 8)) != first
    # An order that a state was saved in must be the same with the next version.
    assert list(Permutation(10, 7)) == [9, 0, 7, 4, 3, 6, 5, 1, 8, 2]
    assert list(islice(Permutation(2**40, 7), 3)) == [310506972648, 651171502376, 70465444546]


@pytest.mark.parametrize("length", [3, 4, 5])
def test_all_orders_of_few_records_are_about_as_frequent(length: int) -> None:
    tries = 1200
    seen = Counter(tuple(Permutation(length, seed)) for seed in range(tries))
    counts = torch.tensor([seen[each] for each in permutations(range(length))])
    assert counts.min() > 0
    assert excess(counts, len(counts) - 1) < 5


@pytest.mark.parametrize("length", [10, 97])
def test_every_index_is_as_likely_at_every_position(length: int) -> None:
    orders = torch.stack([order(length, seed) for seed in range(600)])
    counts = torch.stack([torch.bincount(column, minlength=length) for column in orders.T])
    assert excess(counts, (length - 1) ** 2) < 5
    steps = (orders[:, 1:] - orders[:, :-1]) % length
    assert excess(torch.bincount(steps.flatten(), minlength=length)[1:], length - 2) < 5


@pytest.mark.parametrize("length", [5000, 70_000, 300_000, NARROW, NARROW + 1, 10**10])
def test_neighbours_are_independent_also_at_the_networks_own_distances(length: int) -> None:
    half = 1 << ((length - 1).bit_length() // 2)
    indices = order(length, 3, 3 * half + 300_000)
    coarse = indices * 16 // length
    for distance in (1, 2, 8, half, half + 1, 3 * half):
        pairs = torch.bincount(coarse[:-distance] * 16 + coarse[distance:], minlength=256)
        assert excess(pairs, 255) < 5
        low_bits = (indices[distance:] ^ indices[:-distance]) & 255
        assert excess(torch.bincount(low_bits, minlength=256), 255) < 5


def test_orders_of_neighbouring_seeds_have_nothing_in_common() -> None:
    same = sum(int((order(1000, seed) == order(1000, seed + 1)).sum()) for seed in range(40))
    # One match per pair is expected of independent orders; forty of them are Poisson's.
    assert abs(same - 40) < 5 * math.sqrt(40)


def test_a_trillion_records_take_no_memory() -> None:
    tracemalloc.start()
    try:
        walk = Permutation(10**12, 0).walk(step=8)
        assert sum(1 for _ in islice(walk, 3 * BLOCK)) == 3 * BLOCK
        assert tracemalloc.get_traced_memory()[1] < 700_000
    finally:
        tracemalloc.stop()


def test_positions_are_not_put_on_torchs_default_device() -> None:
    expected = list(Permutation(20, 1))
    torch.set_default_device("meta")
    try:
        assert list(Permutation(20, 1)) == expected
    finally:
        torch.set_default_device(None)


@given(length=st.integers(1, 40), start=st.integers(0, 100), count=st.integers(0, 90), step=st.integers(1, 7))
def test_places_behind_the_end_begin_again(length: int, start: int, count: int, step: int) -> None:
    places = range(start, start + count, step)
    for one in (range(length), Permutation(length, 3)):
        whole = list(one)
        assert list(around(one, places)) == [whole[place % length] for place in places]


def test_a_derived_seed_depends_on_each_part_and_their_order() -> None:
    derived = [derive_seed(0, 1), derive_seed(1, 0), derive_seed(0, 1, 0), derive_seed(1), derive_seed(-1)]
    assert len(set(derived)) == 5
    assert all(0 <= seed < 2**63 for seed in derived)
