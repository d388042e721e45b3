"""Turning ``devices=`` into device indices."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

from polyxla.contracts.discovery import Device
from polyxla.env import POLYXLA_DEVICES, Setting
from polyxla.errors import DevicesError

MAX_MADE = 4096
"""Largest number of devices that are made on request; a larger count is taken for a typing error."""


def pick_devices(
    asked: Setting, runtime: str, devices: Sequence[Device], growable: bool = False
) -> tuple[int, ...]:
    """Return the indices of the requested devices.

    Args:
        asked: ``"auto"``, a count (``8`` or ``"8"``) or indices (``[5]`` or ``"[5]"``), and its origin.
        runtime: the runtime's name, for errors.
        devices: the runtime's devices.
        growable: whether the runtime makes more devices on request.

    Raises:
        DevicesError: the request cannot be read, or names devices that do not exist.
    """
    if asked.value == "auto":
        return tuple(device.index for device in devices)
    value = _parse(asked)
    if growable and (count := _count_to_make(value, len(devices))):
        return tuple(range(count))
    if isinstance(value, int):
        return _by_count(value, asked, runtime, devices)
    return _by_index(value, asked, runtime, devices)


def _count_to_make(value: int | list[Any], have: int) -> int | None:
    """Return how many devices to make: a larger count, or indices 0 to count - 1. None: make none."""
    count = value if isinstance(value, int) else len(value)
    if not have < count <= MAX_MADE or (isinstance(value, list) and value != list(range(count))):
        return None
    return count


def _parse(asked: Setting) -> int | list[Any]:
    value = asked.value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:  # raised also for a number with more digits than Python converts
            raise _unreadable(asked) from None
    if isinstance(value, tuple | range):
        value = list(value)
    if isinstance(value, int | list) and not isinstance(value, bool):
        return value
    raise _unreadable(asked)


def _unreadable(asked: Setting) -> DevicesError:
    forms = [_written(asked, text) for text in ("auto", "8", "[5]")]
    fix = f"Write {forms[0]}, a count such as {forms[1]}, or indices such as {forms[2]}."
    if isinstance(asked.value, str) and re.fullmatch(r"\d+( *, *\d+)+", asked.value):
        fix = f"Write {_written(asked, f'[{asked.value}]')}."
    problem = f"devices={asked.value!r} is neither a count, a list of indices nor 'auto'"
    return DevicesError(problem, where=asked.origin, fix=fix)


def _written(asked: Setting, text: str) -> str:
    """Return how another value is written where this one was: an option, a variable, or in Python."""
    if asked.origin.startswith("--devices"):
        return shlex.join(["--devices", text])
    if asked.origin.startswith(POLYXLA_DEVICES):
        return f"{POLYXLA_DEVICES}={shlex.quote(text)}"
    return f"devices={text!r}" if text == "auto" else f"devices={text}"


def _by_count(count: int, asked: Setting, runtime: str, devices: Sequence[Device]) -> tuple[int, ...]:
    if count < 1:
        raise DevicesError(
            f"devices={count} asks for no device", where=asked.origin, fix=_valid_counts(asked, devices)
        )
    if count > len(devices):
        raise DevicesError(
            f"devices={count} asks for {count} devices, but runtime {runtime} has {len(devices)} here",
            where=asked.origin,
            fix=_valid_counts(asked, devices),
        )
    return tuple(device.index for device in devices[:count])


def _valid_counts(asked: Setting, devices: Sequence[Device]) -> str:
    if len(devices) == 1:
        return f"Write {_written(asked, '1')}."
    return f"Write a count from 1 to {len(devices)}, or {_written(asked, 'auto')} for all of them."


def _by_index(indices: list[Any], asked: Setting, runtime: str, devices: Sequence[Device]) -> tuple[int, ...]:
    have = [device.index for device in devices]
    last = _written(asked, f"[{have[-1]}]")
    span = f"Name devices from {have[0]} to {have[-1]}, each once, such as {last}."
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
