"""A shuffled order that is computed instead of stored: it must be a permutation, and look random."""

from __future__ import annotations

import math
import sys
from collections import Counter
from itertools import islice, permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyxla_sampler.permutation import BLOCK, INT32_LENGTH, MAX_LENGTH, Permutation, wrap_around

seeds = st.integers(-(2**70), 2**70)


def excess(counts: torch.Tensor, degrees: int) -> float:
    """Return how many standard deviations the chi-squared statistic of `counts` is above its mean."""
    expected = counts.double().mean()
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    return (chi_squared - degrees) / math.sqrt(2 * degrees)


def order(length: int, seed: int, first: int | None = None) -> torch.Tensor:
    return torch.tensor(list(Permutation(length, seed).walk(0, first)))


@given(length=st.integers(0, 3 * BLOCK), seed=seeds)
def test_every_index_occurs_once(length: int, seed: int) -> None:
    assert sorted(Permutation(length, seed)) == list(range(length))


def test_every_index_occurs_once_in_a_long_order() -> None:
    length = INT32_LENGTH // 4 - 1
    assert torch.equal(order(length, 5).sort().values, torch.arange(length))


@given(length=st.integers(1, 2 * BLOCK), seed=seeds, start=st.integers(0, 2 * BLOCK), step=st.integers(1, 9))
def test_a_walk_is_a_slice_of_the_whole_order(length: int, seed: int, start: int, step: int) -> None:
    permutation = Permutation(length, seed)
    assert list(permutation.walk(start, step=step)) == list(permutation)[start::step]
    assert list(permutation.walk(start, start + 50, step)) == list(permutation)[start : start + 50 : step]


@given(length=st.integers(1, MAX_LENGTH), seed=seeds, data=st.data())
def test_indices_of_the_longest_orders_are_distinct(length: int, seed: int, data: st.DataObject) -> None:
    permutation = Permutation(length, seed)
    assert len(range(permutation.length)) == length
    start = data.draw(st.integers(0, length - 1))
    some = list(islice(permutation.walk(start), 300))
    assert len(set(some)) == len(some) == min(300, length - start)
    assert 0 <= min(some) <= max(some) < length
    assert [permutation[start], permutation[-1]] == [some[0], permutation[length - 1]]


def test_positions_and_lengths_out_of_range_are_errors() -> None:
    with pytest.raises(IndexError):
        Permutation(5, 0)[5]
    with pytest.raises(ValueError, match=r"length=-1 .* not between 0 and 2\*\*62"):
        Permutation(-1, 0)
    with pytest.raises(ValueError, match="not between"):
        Permutation(MAX_LENGTH + 1, 0)


def test_the_order_depends_only_on_the_seed() -> None:
    torch.manual_seed(0)
    first = list(Permutation(100, 7))
    torch.manual_seed(1)
    assert list(Permutation(100, 7)) == first
    assert list(Permutation(100, 8)) != first
    # Saved states depend on the order, so it must not change with a new version.
    assert list(Permutation(10, 7)) == [9, 0, 7, 4, 3, 6, 5, 1, 8, 2]
    assert list(islice(Permutation(2**40, 7), 3)) == [310506972648, 651171502376, 70465444546]


@pytest.mark.parametrize("length", [3, 4, 5])
def test_all_orders_of_few_records_are_equally_frequent(length: int) -> None:
    tries = 1200
    seen = Counter(tuple(Permutation(length, seed)) for seed in range(tries))
    counts = torch.tensor([seen[each] for each in permutations(range(length))])
    assert counts.min() > 0
    assert excess(counts, len(counts) - 1) < 5


@pytest.mark.parametrize("length", [10, 97])
def test_every_index_is_equally_likely_at_every_position(length: int) -> None:
    orders = torch.stack([order(length, seed) for seed in range(600)])
    counts = torch.stack([torch.bincount(column, minlength=length) for column in orders.T])
    assert excess(counts, (length - 1) ** 2) < 5
    steps = (orders[:, 1:] - orders[:, :-1]) % length
    assert excess(torch.bincount(steps.flatten(), minlength=length)[1:], length - 2) < 5


@pytest.mark.parametrize("length", [5000, 70_000, 300_000, INT32_LENGTH, INT32_LENGTH + 1, 10**10])
def test_indices_are_independent_at_the_distances_of_the_network_too(length: int) -> None:
    half = 1 << ((length - 1).bit_length() // 2)
    indices = order(length, 3, 3 * half + 300_000)
    coarse = indices * 16 // length
    for distance in (1, 2, 8, half, half + 1, 3 * half):
        pairs = torch.bincount(coarse[:-distance] * 16 + coarse[distance:], minlength=256)
        assert excess(pairs, 255) < 5
        low_bits = (indices[distance:] ^ indices[:-distance]) & 255
        assert excess(torch.bincount(low_bits, minlength=256), 255) < 5


def test_orders_of_consecutive_seeds_are_independent() -> None:
    same = sum(int((order(1000, seed) == order(1000, seed + 1)).sum()) for seed in range(40))
    # Independent orders match once per pair on average, so forty pairs follow a Poisson distribution.
    assert abs(same - 40) < 5 * math.sqrt(40)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_a_trillion_records_take_constant_memory() -> None:
    walk = Permutation(10**12, 0).walk(step=8)
    assert sum(1 for _ in islice(walk, 3 * BLOCK)) == 3 * BLOCK
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water_bytes()
    assert sum(1 for _ in islice(walk, 200 * BLOCK)) == 200 * BLOCK
    assert high_water_bytes() - before < 8 << 20


def high_water_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def test_positions_are_not_on_torchs_default_device() -> None:
    expected = list(Permutation(20, 1))
    torch.set_default_device("meta")
    try:
        assert list(Permutation(20, 1)) == expected
    finally:
        torch.set_default_device(None)
        # torch.get_default_device() of torch 2.9 fails after that, in the tests that follow in this process.
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


@given(length=st.integers(1, 40), start=st.integers(0, 100), count=st.integers(0, 90), step=st.integers(1, 7))
def test_positions_beyond_the_end_wrap_around(length: int, start: int, count: int, step: int) -> None:
    positions = range(start, start + count, step)
    for order in (range(length), Permutation(length, 3)):
        whole = list(order)
        assert list(wrap_around(order, positions)) == [whole[position % length] for position in positions]
