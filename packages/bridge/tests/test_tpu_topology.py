"""The extension that describes how a TPU's chips are arranged, called as C calls it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import c_int32, c_void_p
from typing import Any

import pytest

from polyxla_bridge import abi
from polyxla_bridge.engine.engine import Engine
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings, Coordinates
from polyxla_bridge.table.handles import Bridge
from polyxla_bridge.table.tpu_topology import TpuTopology

PLACES = tuple(Coordinates(chip, 0, 0, core) for chip in range(2) for core in range(2))
"""Two chips of two cores, as of a v3."""
Ask = Callable[..., Any]


@pytest.fixture
def ask(free_port: Callable[[], int]) -> Iterator[Ask]:
    """Return a function that calls a function of the extension, and raises if it returns an error."""

    def open_engine() -> Engine:
        return JaxEngine(BridgeSettings(4, 1, 0, f"127.0.0.1:{free_port()}", places=PLACES))

    bridge = Bridge(open_engine, lambda: None)
    bridge.start()
    topology = TpuTopology(bridge, None)
    extension = abi.TpuTopologyExtension.from_address(topology.address)

    def call(name: str, type_: Any, **given: Any) -> Any:
        arguments = type_(struct_size=ctypes.sizeof(type_), **given)
        function = ctypes.CFUNCTYPE(c_void_p, c_void_p)(getattr(extension, name))
        if function(ctypes.addressof(arguments)):
            raise ValueError(name)
        return arguments

    yield call
    bridge.engine.close()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("process_count", 1),
        ("chips_per_process", 2),
        ("chip_count", 2),
        ("logical_device_count", 4),
        ("logical_device_count_per_chip", 2),
        ("is_subslice_topology", 0),
    ],
)
def test_counts(ask: Ask, name: str, count: int) -> None:
    assert ask(name, abi.TpuCount).count == count


def test_places(ask: Ask) -> None:
    numbers = (c_int32 * 4)()
    address = ctypes.addressof(numbers)
    found = ask(
        "chip_coord_and_idx_for_logi_device", abi.TpuChipOfDevice, device=3, most=4, coordinates=address
    )
    assert (list(numbers)[: found.count], found.index) == ([1, 0, 0], 1)
    found = ask(
        "logical_device_id_from_chip_coord_and_idx", abi.TpuDeviceAt, coordinates=address, count=3, index=0
    )
    assert found.device == 2
    assert ask("chip_id_from_coord", abi.TpuChipAt, coordinates=address, count=3).chip == 1
    place = ask("proc_id_and_idx_on_proc_for_chip", abi.TpuPlace, asked=1)
    assert (place.process, place.index) == (0, 1)
    place = ask("proc_id_and_idx_on_proc_for_logi_device", abi.TpuPlace, asked=3)
    assert (place.process, place.index) == (0, 3)
    found = ask("chip_bounds", abi.TpuBounds, most=4, bounds=address)
    assert list(numbers)[: found.count] == [2, 1, 1]
    found = ask("logical_device_ids_on_process", abi.TpuDevicesOfProcess, process=0, most=4, ids=address)
    assert list(numbers)[: found.count] == [0, 1, 2, 3]


def test_what_does_not_fit_or_exist_is_an_error(ask: Ask) -> None:
    numbers = (c_int32 * 1)()
    address = ctypes.addressof(numbers)
    for name, type_, given in (
        ("chip_bounds", abi.TpuBounds, {"most": 1, "bounds": address}),
        ("proc_id_and_idx_on_proc_for_chip", abi.TpuPlace, {"asked": 2}),
        ("get_routing_strategy", abi.TpuCount, {}),
    ):
        with pytest.raises(ValueError, match=name):
            ask(name, type_, **given)
