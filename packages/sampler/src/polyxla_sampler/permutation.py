"""A shuffled order of any length, computed index by index instead of stored as a list."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch

BLOCK = 8192
"""Indices computed at a time while iterating; with all buffers this takes less than 1 MiB."""

MAX_LENGTH = 2**62
"""An order of this length has 2**31 rows; their product with 31 bits of a hash still fits into int64."""

INT32_LENGTH = 2**24
"""Longest order computed in int32, which is faster: it has 2**12 rows, which leaves 18 bits of a hash."""

# With four rounds, positions that differ in their column only stay correlated, as test_permutation.py
# measures; with five they do not. In short orders a round has few values to hash, so they need more
# rounds, and can afford them.
_ROUNDS, _ROUNDS_WHEN_SHORT, _SHORT = 5, 17, 4096


class Permutation:
    """Every index of ``range(length)`` once, in an order that depends on `seed` only.

    Only the keys are stored, so ten records take as much memory as a trillion, and any position can be
    computed first.

    The index at a position is the position, encrypted. Position ``p`` is a cell of a rectangle of
    ``2**bits`` columns: row ``p >> bits``, and the lower bits are the column. A Feistel network encrypts the
    cell: each round changes the column by a hash of the row, or the row by a hash of the column. Such a
    round can be undone for any hash function, so the network maps the cells one to one. The rectangle has
    as many rows as `length` needs, so its last row may reach beyond `length`. A position that is encrypted
    to one of those cells is encrypted again until it is not: "cycle walking", which is one to one as well.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), "generalized Feistel" and
    "cycle walking".

    Args:
        length: number of indices, 0 to 2**62.
        seed: any integer.

    Raises:
        ValueError: `length` is out of its range.
    """

    def __init__(self, length: int, seed: int) -> None:
        if not 0 <= length <= MAX_LENGTH:
            raise ValueError(f"length={length} of a permutation is not between 0 and 2**62.")
        self.length = length
        self.seed = seed
        self._integers = _INT32 if length <= INT32_LENGTH else _INT64
        width, scalar = self._integers.bits, self._integers.scalar
        self._bits = max(length - 1, 0).bit_length() // 2
        # About as many rows as columns, so that both halves of a cell are mixed equally.
        rows = -(-length // (1 << self._bits))
        # How many bits of a hash can be multiplied by `rows` without reaching the sign bit.
        scaled = width - 1 - rows.bit_length()
        # Operands are tensors: torch takes half as long for them as for Python's numbers.
        self._columns_mask, self._shift_row = scalar((1 << self._bits) - 1), scalar(self._bits)
        self._rows, self._length = scalar(rows), scalar(length)
        self._shift_column = scalar(width - self._bits)
        self._shift_hash, self._negative = scalar(width - scaled), scalar(-(1 << scaled))
        self._shift_scaled, self._shift_sign = scalar(scaled), scalar(width - 1)
        self._keys = _keys(seed, _ROUNDS if length > _SHORT else _ROUNDS_WHEN_SHORT, self._integers)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> int:
        """Return the index at `position`; a negative one counts from the end, as in a list.

        Raises:
            IndexError: there is no such position.
        """
        # range checks the bounds, and counts negative positions from the end.
        return self._block(range(self.length)[position], 1, 1)[0]

    def __iter__(self) -> Iterator[int]:
        return self.walk()

    def walk(self, start: int = 0, stop: int | None = None, step: int = 1) -> Iterator[int]:
        """Iterate over the indices at positions ``range(length)[start:stop:step]``; `step` is positive."""
        positions = range(self.length)[start:stop:step]
        begins = range(0, len(positions), BLOCK)
        return chain.from_iterable(
            self._block(positions[begin], min(BLOCK, len(positions) - begin), step) for begin in begins
        )

    def _block(self, start: int, count: int, step: int) -> list[int]:
        positions = torch.arange(start, start + count * step, step, dtype=torch.int64, device="cpu")
        found = self._indices(positions.to(self._integers.dtype))
        # tolist() of an array takes a quarter of the time that a tensor's takes.
        numbers = array(self._integers.code, bytes(self._integers.bits // 8 * count))
        torch.frombuffer(numbers, dtype=self._integers.dtype).copy_(found)
        return numbers.tolist()

    def _indices(self, positions: torch.Tensor) -> torch.Tensor:
        found = self._encrypt(positions)
        # Cycle walking. Less than one row lies beyond the length, so few positions need it.
        while (outside := found >= self._length).any():
            where = outside.nonzero().squeeze(1)
            found[where] = self._encrypt(found[where])
        return found

    def _encrypt(self, positions: torch.Tensor) -> torch.Tensor:
        """Run the Feistel network; return cells of the rectangle, [position]. Overwrites `positions`."""
        row = positions >> self._shift_row
        column = positions.bitwise_and_(self._columns_mask)
        # Column rounds and row rounds take turns. A hash is added + factor * x * x, wrapped to the width of
        # the integers; only its upper bits are used, since the lower ones depend on few bits of x.
        for number, (factor, added) in enumerate(self._keys):
            if number % 2:
                self._row_round(row, torch.addcmul(added, column, column, value=factor))
            elif self._bits:
                self._column_round(column, torch.addcmul(added, row, row, value=factor))
        return row.bitwise_left_shift_(self._shift_row).bitwise_or_(column)

    def _column_round(self, column: torch.Tensor, hashed: torch.Tensor) -> None:
        """Exclusive-or the column with the upper bits of the hash."""
        # The mask removes the copies of the sign bit that an arithmetic shift leaves.
        column ^= hashed.bitwise_right_shift_(self._shift_column).bitwise_and_(self._columns_mask)

    def _row_round(self, row: torch.Tensor, hashed: torch.Tensor) -> None:
        """Add an offset from the hash to the row, modulo the number of rows."""
        # The upper bits of the hash as a number in [-2**scaled, 0): the or sets the sign, whatever it was.
        offset = hashed.bitwise_right_shift_(self._shift_hash).bitwise_or_(self._negative)
        # Scaled to [-rows, 0): multiply and shift, which takes less time than a remainder.
        row += offset.mul_(self._rows).bitwise_right_shift_(self._shift_scaled)
        # Add `rows` where the row is negative: the shifted sign is -1 there, all bits set, and else 0.
        row += torch.bitwise_right_shift(row, self._shift_sign, out=offset).bitwise_and_(self._rows)


@dataclass(frozen=True)
class _Integers:
    """The integer type of the computation.

    Attributes:
        bits: width, the sign bit included.
        dtype: torch's name of the type.
        code: the type code in Python's array module.
    """

    bits: int
    dtype: torch.dtype
    code: str

    def scalar(self, value: int) -> torch.Tensor:
        """Return `value` as a tensor of this type."""
        # On the CPU whatever torch's default device is: these are positions, not data.
        return torch.tensor(value, dtype=self.dtype, device="cpu")


_INT32, _INT64 = _Integers(32, torch.int32, "i"), _Integers(64, torch.int64, "q")


Order = Permutation | range
"""An index for each position: shuffled, or in the dataset's order."""


def make_order(length: int, shuffle: bool, seed: int) -> Order:
    """Return an order of `length` records."""
    return Permutation(length, seed) if shuffle else range(length)


def wrap_around(order: Order, positions: range) -> Iterator[int]:
    """Iterate over the indices at `positions`; after the end of the order it starts from the beginning."""
    return chain.from_iterable(_passes(order, positions))


def _passes(order: Order, positions: range) -> Iterator[Iterator[int]]:
    """Iterate over one iterator for each pass through the order."""
    while positions:
        inside = range(positions.start, min(positions.stop, len(order)), positions.step)
        if isinstance(order, Permutation):
            yield order.walk(inside.start, inside.stop, inside.step)
        else:
            yield iter(order[inside.start : inside.stop : inside.step])
        beyond = positions[len(inside) :]
        positions = range(beyond.start - len(order), beyond.stop - len(order), beyond.step)


def _keys(seed: int, rounds: int, integers: _Integers) -> list[tuple[int, torch.Tensor]]:
    """Return the factor and the summand of each round's hash."""
    size_bytes = integers.bits // 8
    stream = array(integers.code, hashlib.shake_128(repr(seed).encode()).digest(2 * rounds * size_bytes))
    # Odd factors: an even one would lose the upper bits of the square.
    return [
        (factor | 1, integers.scalar(added)) for factor, added in zip(stream[::2], stream[1::2], strict=True)
    ]
