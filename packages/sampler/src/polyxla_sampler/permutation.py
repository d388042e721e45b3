"""A shuffled order of any length that is computed index by index instead of being kept in a list."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch

BLOCK = 8192
"""Indices computed at a time while iterating: with all buffers, less than 1 MiB."""

LONGEST = 2**62
"""Half of an index and 31 bits of a hash multiply to what int64 holds."""

NARROW = 2**24
"""Up to this length words are int32, which processors multiply faster: half of an index leaves 18 bits."""

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
        self._word = _NARROW_WORD if length <= NARROW else _WIDE_WORD
        rows = -(-length // (1 << self._bits))
        # How many of a hash's bits are scaled to the rows: the product keeps its sign.
        scaled = self._word.bits - 1 - rows.bit_length()
        # Operands are tensors: torch takes half as long for them as for Python's numbers.
        scalar = self._word.scalar
        self._columns_mask, self._shift_row = scalar((1 << self._bits) - 1), scalar(self._bits)
        self._rows, self._length = scalar(rows), scalar(length)
        self._shift_column = scalar(self._word.bits - self._bits)
        self._shift_hash, self._negative = scalar(self._word.bits - scaled), scalar(-(1 << scaled))
        self._shift_scaled, self._shift_sign = scalar(scaled), scalar(self._word.bits - 1)
        self._keys = _keys(seed, _ROUNDS if length > _SHORT else _ROUNDS_WHEN_SHORT, self._word)

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
        places = torch.arange(start, start + count * step, step, dtype=torch.int64, device="cpu")
        found = self._indices(places.to(self._word.dtype))
        # The array's tolist takes a quarter of the time that a tensor's does.
        numbers = array(self._word.code, bytes(self._word.bits // 8 * count))
        torch.frombuffer(numbers, dtype=self._word.dtype).copy_(found)
        return numbers.tolist()

    def _indices(self, positions: torch.Tensor) -> torch.Tensor:
        found = self._enciphered(positions)
        while (outside := found >= self._length).any():
            where = outside.nonzero().squeeze(1)
            found[where] = self._enciphered(found[where])
        return found

    def _enciphered(self, positions: torch.Tensor) -> torch.Tensor:
        """Return [position] within the rectangle, of the word's dtype; `positions` are overwritten."""
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
        # Its upper bits as a number in [-2**scaled, 0), scaled to [-rows, 0).
        offset = hashed.bitwise_right_shift_(self._shift_hash).bitwise_or_(self._negative)
        row += offset.mul_(self._rows).bitwise_right_shift_(self._shift_scaled)
        row += torch.bitwise_right_shift(row, self._shift_sign, out=offset).bitwise_and_(self._rows)


@dataclass(frozen=True)
class _Word:
    """The integers that are computed with.

    Attributes:
        bits: of each, its sign included.
        dtype: as torch has them.
        code: as Python's arrays name them.
    """

    bits: int
    dtype: torch.dtype
    code: str

    def scalar(self, value: int) -> torch.Tensor:
        """Return a tensor of one of them."""
        # On the CPU whatever torch's default device is: these are positions, not data.
        return torch.tensor(value, dtype=self.dtype, device="cpu")


_NARROW_WORD, _WIDE_WORD = _Word(32, torch.int32, "i"), _Word(64, torch.int64, "q")


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


def _keys(seed: int, rounds: int, word: _Word) -> list[tuple[int, torch.Tensor]]:
    stream = array(word.code, hashlib.shake_128(repr(seed).encode()).digest(2 * rounds * word.bits // 8))
    # An even factor would lose the upper bits of the square.
    return [(factor | 1, word.scalar(added)) for factor, added in zip(stream[::2], stream[1::2], strict=True)]
