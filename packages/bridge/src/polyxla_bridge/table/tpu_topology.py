"""The extension of PJRT's function table that describes how a TPU's chips are arranged.

TorchTPU counts the chips when it loads the first kernel for their cores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from polyxla_bridge import abi
from polyxla_bridge.abi import Code
from polyxla_bridge.engine.engine import EngineDevice
from polyxla_bridge.env import Coordinates
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.table.extensions import Extension
from polyxla_bridge.table.handles import Bridge, read_array

_Chip = tuple[int, int, int]


class TpuTopology(Extension):
    """The extension.

    Args:
        bridge: its engine has the devices.
        next_extension: the address of the table's next extension.
    """

    def __init__(self, bridge: Bridge, next_extension: int | None) -> None:
        counts = {
            "process_count": lambda: len(self._processes()),
            "chips_per_process": lambda: len(self._chips()) // len(self._processes()),
            "core_count_per_chip": lambda: self._cores() // len(self._chips()),
            "chip_count": lambda: len(self._chips()),
            "core_count": self._cores,
            "logical_device_count_per_process": lambda: len(self._devices()) // len(self._processes()),
            "logical_device_count": lambda: len(self._devices()),
            "logical_device_count_per_chip": lambda: len(self._devices()) // len(self._chips()),
            "core_count_per_process": lambda: self._cores() // len(self._processes()),
            # A slice is whole, and its links know no limits.
            "is_subslice_topology": lambda: False,
            "is_enhanced_barrier_enabled": lambda: False,
            "has_limited_ici_connectivity": lambda: False,
        }
        functions: dict[str, Callable[[int], None]] = {
            **{name: _answering(count) for name, count in counts.items()},
            "process_ids": self._process_ids,
            "logical_device_ids_on_process": self._devices_of_process,
            "proc_id_and_idx_on_proc_for_chip": self._place_of_chip,
            "proc_id_and_idx_on_proc_for_logi_device": self._place_of_device,
            "chip_id_from_coord": self._chip_at,
            "logical_device_id_from_chip_coord_and_idx": self._device_at,
            "chip_coord_and_idx_for_logi_device": self._chip_of_device,
            "chips_per_process_bounds": self._bounds_of_process,
            "chip_bounds": self._bounds,
        }
        super().__init__(
            bridge,
            abi.TpuTopologyExtension,
            abi.EXTENSION_TYPE_TPU_TOPOLOGY,
            {name: functions.get(name) or _refusing(name) for name in abi.TPU_TOPOLOGY_FUNCTIONS},
            next_extension,
        )

    def _devices(self) -> Sequence[EngineDevice]:
        """Return the devices of this process's slice, which may be one of several."""
        devices = self._bridge.engine.devices
        own = next(_place(device) for device in devices if device.is_local)
        return [device for device in devices if _place(device).slice_index == own.slice_index]

    def _cores(self) -> int:
        return sum(device.cores for device in self._devices())

    def _processes(self) -> list[int]:
        return sorted({device.process_index for device in self._devices()})

    def _chips(self) -> list[_Chip]:
        """Return the chips' coordinates, by their numbers: along x, then y, then z."""
        return sorted({_chip(device) for device in self._devices()}, key=lambda chip: chip[::-1])

    def _on_chip(self, chip: _Chip) -> list[EngineDevice]:
        found = [device for device in self._devices() if _chip(device) == chip]
        if not found:
            raise PjrtError(Code.INVALID_ARGUMENT, f"no chip of the slice has the coordinates {chip}")
        return found

    def _of_process(self, process: int) -> list[EngineDevice]:
        return [device for device in self._devices() if device.process_index == process]

    def _device(self, index: int) -> EngineDevice:
        for device in self._devices():
            if device.index == index:
                return device
        raise PjrtError(Code.INVALID_ARGUMENT, f"the slice has no device {index}")

    def _process_ids(self, pointer: int) -> None:
        args = abi.TpuProcessIds.from_address(pointer)
        args.count = _write(args.ids, args.most, self._processes())

    def _devices_of_process(self, pointer: int) -> None:
        args = abi.TpuDevicesOfProcess.from_address(pointer)
        found = [device.index for device in self._of_process(args.process)]
        args.count = _write(args.ids, args.most, found)

    def _place_of_chip(self, pointer: int) -> None:
        args = abi.TpuPlace.from_address(pointer)
        chips = self._chips()
        if not 0 <= args.asked < len(chips):
            raise PjrtError(Code.INVALID_ARGUMENT, f"the slice has no chip {args.asked}")
        chip = chips[args.asked]
        args.process = self._on_chip(chip)[0].process_index
        own = {_chip(device) for device in self._of_process(args.process)}
        args.index = [other for other in chips if other in own].index(chip)

    def _place_of_device(self, pointer: int) -> None:
        args = abi.TpuPlace.from_address(pointer)
        device = self._device(args.asked)
        args.process = device.process_index
        args.index = self._of_process(args.process).index(device)

    def _chip_at(self, pointer: int) -> None:
        args = abi.TpuChipAt.from_address(pointer)
        args.chip = self._chips().index(_read_chip(args))

    def _device_at(self, pointer: int) -> None:
        args = abi.TpuDeviceAt.from_address(pointer)
        args.device = self._on_chip(_read_chip(args))[args.index].index

    def _chip_of_device(self, pointer: int) -> None:
        args = abi.TpuChipOfDevice.from_address(pointer)
        device = self._device(args.device)
        args.count = _write(args.coordinates, args.most, _chip(device))
        args.index = self._on_chip(_chip(device)).index(device)

    def _bounds(self, pointer: int) -> None:
        args = abi.TpuBounds.from_address(pointer)
        args.count = _write(args.bounds, args.most, _extent(self._chips()))

    def _bounds_of_process(self, pointer: int) -> None:
        args = abi.TpuBounds.from_address(pointer)
        own = [_chip(device) for device in self._of_process(self._processes()[0])]
        args.count = _write(args.bounds, args.most, _extent(own))


def _answering(count: Callable[[], int]) -> Callable[[int], None]:
    def answer(pointer: int) -> None:
        abi.TpuCount.from_address(pointer).count = count()

    return answer


def _refusing(name: str) -> Callable[[int], None]:
    def refuse(_: int) -> None:
        raise PjrtError(
            Code.UNIMPLEMENTED, f"{name} of a TPU's topology is not implemented by polyxla-bridge"
        )

    return refuse


def _place(device: EngineDevice) -> Coordinates:
    if device.place is None:
        raise PjrtError(Code.UNIMPLEMENTED, "the devices are no TPU's: they have no coordinates")
    return device.place


def _chip(device: EngineDevice) -> _Chip:
    place = _place(device)
    return place.x, place.y, place.z


def _read_chip(args: Any) -> _Chip:
    x, y, z = read_array(args.coordinates, args.count, ctypes.c_int32)
    return x, y, z


def _extent(chips: Sequence[_Chip]) -> list[int]:
    return [max(along) - min(along) + 1 for along in zip(*chips, strict=True)]


def _write(to: int, most: int, numbers: Sequence[int]) -> int:
    """Write numbers into the caller's array, which has room for `most`; return how many there are."""
    if len(numbers) > most:
        raise PjrtError(Code.INVALID_ARGUMENT, f"{len(numbers)} numbers do not fit into {most}")
    (ctypes.c_int32 * len(numbers)).from_address(to)[:] = list(numbers)
    return len(numbers)
