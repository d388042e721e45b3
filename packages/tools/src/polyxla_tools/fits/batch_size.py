"""The search for the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

PLACE = "{}"
"""What stands for the batch size in the script's arguments."""
TILE = 8
"""Above it, batch sizes are multiples of it: HBM holds arrays in tiles of 8 rows.
Source: "Cloud TPU performance guide", Cloud TPU documentation."""


def with_batch_size(command: Sequence[str], size: int) -> list[str]:
    """Return the script's arguments for a batch size."""
    return [argument.replace(PLACE, str(size)) for argument in command]


def largest_fitting(fits: Callable[[int], bool], first: int) -> int:
    """Return the largest batch size that fits; 0 if not even 1 does.

    Doubles the size until it does not fit, then halves the interval.

    Args:
        fits: tries a batch size. If one fits, so must all smaller ones.
        first: the first size to try.
    """
    fitting, too_large = 0, 0
    number = _number(max(first, 1))
    while not too_large or too_large - fitting > 1:
        if fits(_size(number)):
            fitting = number
        else:
            too_large = number
        number = (fitting + too_large) // 2 if too_large else _number(2 * _size(fitting))
    return _size(fitting)


def _size(number: int) -> int:
    """Return the batch size of this number: 1 to 8, then 16, 24 and so on."""
    return number if number <= TILE else TILE * (number - TILE + 1)


def _number(size: int) -> int:
    return size if size <= TILE else size // TILE + TILE - 1
