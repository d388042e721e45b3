"""A shuffled order of any length that is computed index by index instead of being kept in a list."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from itertools import chain

import torch

BLOCK = 8192
"""Indices computed at a time while iterating: with all buffers, less than 1 MiB."""

LONGEST = 2**62
"""Products of half an index and 31 bits stay in int64."""

# Five rounds: with four, positions that differ in their column only stay related, as test_permutation.py
# measures. Short orders have few values for a round's function to differ in, and cost nothing, so they get
# more.
_ROUNDS, _ROUNDS_WHEN_SHORT, _SHORT = 5, 17, 4096


def derive_seed(*parts: int) -> int:
    """Return a seed of 63 bits that depends on every part and on their order."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Permutation:
    """Every index of ``range(length)`` once, in an order that depends on `seed` only.

    Nothing is kept but the keys, so it takes the same memory for ten records and a trillion, and any
    position can be asked for first. Positions are enciphered by a Feistel network over a rectangle of
    ``2**bits`` columns and as many rows as `length` needs; what falls into the rectangle's last row behind
    `length` is enciphered again until it does not.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), "generalized Feistel" and
    "cycle walking".

    Args:
        length: number of indices, 0 to 2**62.
        seed: any integer.

    Raises:
        ValueError: `length` is out of its range.
    """

    def __init__(self, length: int, seed: int) -> None:
        if not 0 <= length <= LONGEST:
            raise ValueError(f"length={length} of a permutation is not between 0 and 2**62.")
        self.length = length
        self.seed = seed
        self._bits = max(length - 1, 0).bit_length() // 2
        # Operands are tensors: torch takes half as long for them as for Python's numbers.
        self._columns_mask, self._shift_row = _scalar((1 << self._bits) - 1), _scalar(self._bits)
        self._rows, self._length = _scalar(-(-length // (1 << self._bits))), _scalar(length)
        self._shift_column = _scalar(64 - self._bits)
        self._keys = _keys(seed, _ROUNDS if length > _SHORT else _ROUNDS_WHEN_SHORT)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> int:
        """Return the index at `position`, which may be negative as a list's.

        Raises:
            IndexError: there is no such position.
        """
        return self._block(range(self.length)[position], 1, 1)[0]

    def __iter__(self) -> Iterator[int]:
        return self.walk()

    def walk(self, start: int = 0, stop: int | None = None, step: int = 1) -> Iterator[int]:
        """Iterate over the indices at ``range(length)[start:stop:step]``, `step` positive."""
        positions = range(self.length)[start:stop:step]
        begins = range(0, len(positions), BLOCK)
        return chain.from_iterable(
            self._block(positions[begin], min(BLOCK, len(positions) - begin), step) for begin in begins
        )

    def _block(self, start: int, count: int, step: int) -> list[int]:
        positions = torch.arange(start, start + count * step, step, dtype=torch.int64, device="cpu")
        # The array's tolist takes a quarter of the time that a tensor's does.
        numbers = array("q", bytes(8 * count))
        torch.frombuffer(numbers, dtype=torch.int64).copy_(self._indices(positions))
        return numbers.tolist()

    def _indices(self, positions: torch.Tensor) -> torch.Tensor:
        found = self._enciphered(positions)
        while (outside := found >= self._length).any():
            where = outside.nonzero().squeeze(1)
            found[where] = self._enciphered(found[where])
        return found

    def _enciphered(self, positions: torch.Tensor) -> torch.Tensor:
        """Return int64 [position] within the rectangle; `positions` are overwritten."""
        row = positions >> self._shift_row
        column = positions.bitwise_and_(self._columns_mask)
        # The square's factor and what is added to it, two for each round.
        for number, (factor, added) in enumerate(self._keys):
            if number % 2:
                self._move_row(row, torch.addcmul(added, column, column, value=factor))
            elif self._bits:
                hashed = torch.addcmul(added, row, row, value=factor)
                column ^= hashed.bitwise_right_shift_(self._shift_column).bitwise_and_(self._columns_mask)
        return row.bitwise_left_shift_(self._shift_row).bitwise_or_(column)

    def _move_row(self, row: torch.Tensor, hashed: torch.Tensor) -> None:
        """Add what the hash says to the row, modulo the number of rows."""
        # Its upper 31 bits as a number in [-2**31, 0), scaled to [-rows, 0).
        offset = hashed.bitwise_right_shift_(_THIRTY_THREE).bitwise_or_(_NEGATIVE)
        row += offset.mul_(self._rows).bitwise_right_shift_(_THIRTY_ONE)
        row += torch.bitwise_right_shift(row, _SIGN, out=offset).bitwise_and_(self._rows)


Order = Permutation | range
"""Something with an index at every place: shuffled, or the dataset's own."""


def order_of(length: int, shuffle: bool, seed: int) -> Order:
    """Return the order of so many records."""
    return Permutation(length, seed) if shuffle else range(length)


def around(order: Order, places: range) -> Iterator[int]:
    """Iterate over the indices at `places`; those behind the order's end begin again at its start."""
    return chain.from_iterable(_rounds(order, places))


def _rounds(order: Order, places: range) -> Iterator[Iterator[int]]:
    while places:
        inside = range(places.start, min(places.stop, len(order)), places.step)
        if isinstance(order, Permutation):
            yield order.walk(inside.start, inside.stop, inside.step)
        else:
            yield iter(order[inside.start : inside.stop : inside.step])
        behind = places[len(inside) :]
        places = range(behind.start - len(order), behind.stop - len(order), behind.step)


def _keys(seed: int, rounds: int) -> list[tuple[int, torch.Tensor]]:
    stream = array("q", hashlib.shake_128(repr(seed).encode()).digest(16 * rounds))
    # An even factor would lose the upper bits of the square.
    return [(factor | 1, _scalar(added)) for factor, added in zip(stream[::2], stream[1::2], strict=True)]


def _scalar(value: int) -> torch.Tensor:
    # On the CPU whatever torch's default device is: these are positions, not data.
    return torch.tensor(value, dtype=torch.int64, device="cpu")


_THIRTY_ONE, _THIRTY_THREE, _SIGN = _scalar(31), _scalar(33), _scalar(63)
_NEGATIVE = _scalar(-(2**31))
