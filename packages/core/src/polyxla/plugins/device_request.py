"""``devices=``: from what was asked for to the indices of devices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from polyxla.contracts.discovery import Device
from polyxla.env import Setting
from polyxla.errors import DevicesError

MOST_GROWN = 4096
"""Largest number of devices made on request; a larger count is taken for a typing error."""


def pick_devices(
    asked: Setting, runtime: str, devices: Sequence[Device], growable: bool = False
) -> tuple[int, ...]:
    """Turn ``devices=`` into the indices of the devices to use.

    Args:
        asked: ``"auto"``, a count (``8`` or ``"8"``) or indices (``[5]`` or ``"[5]"``), and its origin.
        runtime: the runtime's name, for the errors.
        devices: what the runtime has.
        growable: whether a larger count can be had by asking for it.

    Raises:
        DevicesError: it asks for what is not there, or cannot be read.
    """
    if asked.value == "auto":
        return tuple(device.index for device in devices)
    value = _read(asked)
    if growable and (count := _grown(value, len(devices))):
        return tuple(range(count))
    if isinstance(value, int):
        return _first(value, asked, runtime, devices)
    return _named(value, asked, runtime, devices)


def _grown(value: int | list[Any], have: int) -> int | None:
    """Return how many devices to make: more than there are, whether they are counted or named from 0."""
    count = value if isinstance(value, int) else len(value)
    if not have < count <= MOST_GROWN or (isinstance(value, list) and value != list(range(count))):
        return None
    return count


def _read(asked: Setting) -> int | list[Any]:
    value = asked.value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:  # also a number of more digits than Python reads
            raise _unreadable(asked) from None
    if isinstance(value, tuple | range):
        value = list(value)
    if isinstance(value, int | list) and not isinstance(value, bool):
        return value
    raise _unreadable(asked)


def _unreadable(asked: Setting) -> DevicesError:
    return DevicesError(
        f"devices={asked.value!r} is neither a count, a list of indices nor 'auto'",
        where=asked.origin,
        fix="Write devices='auto', a count such as devices=8, or indices such as devices=[5].",
    )


def _first(count: int, asked: Setting, runtime: str, devices: Sequence[Device]) -> tuple[int, ...]:
    if count < 1:
        raise DevicesError(
            f"devices={count} asks for no device",
            where=asked.origin,
            fix=_counts(devices),
        )
    if count > len(devices):
        raise DevicesError(
            f"devices={count} asks for {count} devices, but runtime {runtime} has {len(devices)} here",
            where=asked.origin,
            fix=_counts(devices),
        )
    return tuple(device.index for device in devices[:count])


def _counts(devices: Sequence[Device]) -> str:
    if len(devices) == 1:
        return "Write devices=1."
    return f"Write a count from 1 to {len(devices)}, or devices='auto' for all of them."


def _named(indices: list[Any], asked: Setting, runtime: str, devices: Sequence[Device]) -> tuple[int, ...]:
    have = [device.index for device in devices]
    span = f"Name devices from {have[0]} to {have[-1]}, each once, such as devices=[{have[-1]}]."
    if not indices:
        raise DevicesError("devices=[] names no device", where=asked.origin, fix=span)
    for index in indices:
        if isinstance(index, bool | float) or index not in have:
            raise DevicesError(
                f"devices={indices} names device {index!r}, "
                f"but runtime {runtime} has devices {have[0]} to {have[-1]}",
                where=asked.origin,
                fix=span,
            )
    if len(set(indices)) != len(indices):
        raise DevicesError(f"devices={indices} names a device twice", where=asked.origin, fix=span)
    return tuple(indices)
