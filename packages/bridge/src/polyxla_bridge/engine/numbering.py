"""The number of each replica: its index in the job, torch_xla's ordinal.

On the CPU, replicas count through the processes. A TPU's count through the coordinates of the chips,
whichever process drives a chip.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from polyxla_bridge.abi import Code
from polyxla_bridge.env import BridgeSettings, Coordinates
from polyxla_bridge.errors import PjrtError


class Share(NamedTuple):
    """The replicas of one process.

    Attributes:
        replicas: their indices.
        places: where each is; empty on the CPU.
    """

    replicas: tuple[int, ...]
    places: tuple[Coordinates, ...] = ()


Shares = dict[int, Share]
"""The replicas of each process, by process."""


def by_process(settings: BridgeSettings) -> Shares:
    """Number the replicas in the order of their processes."""
    each = settings.per_process
    return {
        process: Share(tuple(range(process * each, (process + 1) * each)))
        for process in range(settings.processes)
    }


def by_coordinates(places: Mapping[int, Sequence[Coordinates]]) -> Shares:
    """Number the replicas in the order of their coordinates: slice, z, y, x, and the core of the chip.

    Args:
        places: where the replicas of each process are, in the order of the process's devices.

    Raises:
        PjrtError: two replicas are at the same place, because the bounds are not those of the chips.

    Source: ``jax.devices()`` of a v4-32, https://github.com/huggingface/transformers/issues/20252; the first
        words of the error are libtpu's.
    """
    every = sorted((place for of_one in places.values() for place in of_one), key=_order)
    # In the sorted list, equal places are neighbours.
    if twice := [place for place, following in itertools.pairwise(every) if place == following]:
        x, y, z, _, slice_index = twice[0]
        where = "" if slice_index is None else f" of slice {slice_index}"
        raise PjrtError(
            Code.INVALID_ARGUMENT,
            f"duplicate coordinate assignment: two of the chips in use are at {x},{y},{z}{where}, so they do "
            "not form the box that TPU_PROCESS_BOUNDS and TPU_CHIPS_PER_PROCESS_BOUNDS describe",
        )
    numbers = {place: number for number, place in enumerate(every)}
    return {
        process: Share(tuple(numbers[place] for place in of_one), tuple(of_one))
        for process, of_one in places.items()
    }


def _order(place: Coordinates) -> tuple[int, ...]:
    return place.slice_index or 0, place.z, place.y, place.x, place.core


def in_program(numbers: Sequence[int], replicas: int, local: Sequence[int]) -> tuple[int, ...]:
    """Return a program's devices, in the order of its own numbers of replicas and partitions.

    JAX and TorchTPU also compile for a single device, and a TPU node has jobs on some of its cores. For a
    group of every other device, TorchTPU numbers the devices so that those of the group are neighbours.

    Args:
        numbers: the devices that the program's options name; empty for all, in their order.
        replicas: number of devices of the job.
        local: this process's devices.

    Returns:
        The devices' indices; none for all of the job's, in their order.

    Raises:
        PjrtError: the program is for some devices, and another process has one of them.
    """
    every = range(replicas)
    # A program for all devices may list them in any order.
    if set(numbers) != set(every) and not set(numbers) <= set(local):
        raise PjrtError(
            Code.UNIMPLEMENTED,
            f"a program for the devices {list(numbers)} is not supported, only for devices of this "
            f"process or for all {replicas}",
        )
    return () if list(numbers) == list(every) else tuple(numbers)
