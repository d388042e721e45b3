"""The emulated libtpu's reading of the variables: who drives which devices, and what is refused."""

from __future__ import annotations

import os

import pytest

from polyxla_bridge.engine import numbering
from polyxla_bridge.env import BridgeSettings, Coordinates
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.libtpu import client
from polyxla_bridge.libtpu.topology import EmulatedHost, Topology, in_slice


def host(text: str) -> EmulatedHost:
    return EmulatedHost.read({"POLYXLA_LIBTPU_HOST": text})


def one_chip_each(bounds: str, processes: int, per_host: int = 4) -> list[dict[str, str]]:
    """Return the variables of a slice's processes, each of which drives one chip."""
    addresses = ",".join(f"localhost:{8476 + task}" for task in range(processes))
    return [
        {
            "TPU_PROCESS_BOUNDS": bounds,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_VISIBLE_CHIPS": str(task % per_host),
            "CLOUD_TPU_TASK_ID": str(task),
            "TPU_PROCESS_ADDRESSES": addresses,
            "TPU_PROCESS_PORT": str(8476 + task),
        }
        for task in range(processes)
    ]


CHIP_1 = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_VISIBLE_CHIPS": "1"}


def numbers(here: EmulatedHost, environs: list[dict[str, str]]) -> list[tuple[int, ...]]:
    """Return the replicas of each process."""
    places = {task: Topology.read(environ, here).places(here) for task, environ in enumerate(environs)}
    return [share.replicas for share in numbering.by_coordinates(places).values()]


@pytest.mark.parametrize(
    ("chips", "bounds", "expected"),
    [
        pytest.param("v4:2x2x1", "2,2,1", [(0,), (2,), (1,), (3,)], id="v4-8"),
        pytest.param("v5e:2x2x1", "2,2,1", [(0,), (1,), (2,), (3,)], id="v5e-4"),
        pytest.param("v3:2x2x1", "2,2,1", [(0, 1), (4, 5), (2, 3), (6, 7)], id="v3-8"),
        pytest.param("v4:2x2x1", "2,2,2", [(i,) for i in (0, 2, 1, 3, 4, 6, 5, 7)], id="v4-16"),
    ],
)
def test_replicas_are_numbered_by_the_coordinates_of_their_chips(
    chips: str, bounds: str, expected: list[tuple[int, ...]]
) -> None:
    assert numbers(host(chips), one_chip_each(bounds, len(expected))) == expected


@pytest.mark.parametrize(
    ("bounds", "processes", "expected"),
    [("1,1,1,2", 2, [0, 1]), ("2,2,1,2", 8, [0, 1, 4, 5, 2, 3, 6, 7])],
    ids=["one chip", "one host"],
)
def test_processes_share_a_chip_whose_devices_the_bounds_count(
    bounds: str, processes: int, expected: list[int]
) -> None:
    shared = [
        process | {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1,1"}
        for process in one_chip_each(bounds, processes, per_host=processes)
    ]
    here = host("v7x:2x2x1")
    assert numbers(here, shared) == [(number,) for number in expected]
    alone = Topology.read({"TPU_PROCESS_BOUNDS": "1,1,1", **CHIP_1}, here)
    assert alone.devices(here) == (2, 3)
    assert {Topology.read(environ, here).devices(here) for environ in shared} == {
        (i,) for i in range(processes)
    }


def test_the_second_host_of_shared_chips_is_beside_the_first() -> None:
    environs = one_chip_each("2,2,2,2", 16, per_host=8)
    shared = [environ | {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1,1"} for environ in environs]
    here = host("v7x:2x2x1")
    places = [Topology.read(environ, here).places(here) for environ in shared]
    assert places[0] == (Coordinates(0, 0, 0, 0),)
    assert places[9] == (Coordinates(0, 0, 1, 1),)
    assert len(set(places)) == 16


def test_a_host_of_a_cube_has_replicas_of_two_rows() -> None:
    cube = one_chip_each("4,4,4", 64)
    assert sorted(sum(numbers(host("v4:2x2x1"), cube)[:4], ())) == [0, 1, 4, 5]


def test_without_variables_a_process_drives_the_whole_host() -> None:
    here = host("v5e:2x4x1")
    assert numbers(here, [{}]) == [tuple(range(8))]
    assert Topology.read({}, here).places(here)[:3] == tuple(
        map(Coordinates, (0, 1, 0), (0, 0, 1), (0, 0, 0), (0, 0, 0))
    )


@pytest.mark.parametrize(
    ("chips", "bounds", "is_a_box"),
    [("v4:2x2x1", "1,2,1", True), ("v4:2x2x1", "2,1,1", False), ("v5e:2x2x1", "2,1,1", True)],
)
def test_two_chips_need_the_bounds_in_which_they_are_neighbours(
    chips: str, bounds: str, is_a_box: bool
) -> None:
    for environs in (
        one_chip_each(bounds, 2),
        [{"TPU_VISIBLE_CHIPS": "0,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds}],
    ):
        if is_a_box:
            assert sorted(sum(numbers(host(chips), environs), ())) == [0, 1]
        else:
            with pytest.raises(PjrtError, match=r"duplicate coordinate assignment: .* at 0,0,0"):
                numbers(host(chips), environs)


def test_names_of_processes_come_before_names_of_hosts() -> None:
    here = host("v4:2x2x1")
    both = {
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "9,9,9",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
        "TPU_VISIBLE_CHIPS": "3",
        "TPU_VISIBLE_DEVICES": "0",
    }
    assert Topology.read(both, here).visible == (3,)
    hosts_only = {
        name: value for name, value in both.items() if "PROCESS" not in name and "CHIPS" not in name
    }
    with pytest.raises(PjrtError, match="TPU_PROCESS_ADDRESSES= is not the addresses of 729 processes"):
        Topology.read(hosts_only | {"TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1"}, here)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"TPU_VISIBLE_CHIPS": "0,1"}, "TPU_VISIBLE_CHIPS=0,1 is not the 1 of 4 chips"),
        ({"TPU_VISIBLE_CHIPS": "4"}, "TPU_VISIBLE_CHIPS=4 is not the 1 of 4 chips"),
        ({"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1,2"}, "TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1,2 is not three"),
        ({"TPU_VISIBLE_CHIPS": "first"}, "TPU_VISIBLE_CHIPS=first is not numbers"),
        ({"TPU_PROCESS_BOUNDS": "2,2"}, "TPU_PROCESS_BOUNDS=2,2 is not three positive numbers"),
        ({"TPU_PROCESS_BOUNDS": "2,2,0"}, "TPU_PROCESS_BOUNDS=2,2,0 is not three positive numbers"),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:2"}, "TPU_PROCESS_ADDRESSES=a:1,b:2 is not the addresses of 4"),
        ({"CLOUD_TPU_TASK_ID": "4"}, "CLOUD_TPU_TASK_ID=4 is not one of 4 processes"),
        ({"TPU_PROCESS_PORT": "1"}, "TPU_PROCESS_PORT=1 is not the port in localhost:8476, its own address"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(changed: dict[str, str], expected: str) -> None:
    with pytest.raises(PjrtError, match=f"^{expected}"):
        Topology.read(one_chip_each("2,2,1", 4)[0] | changed, host("v4:2x2x1"))


def test_without_a_description_there_is_no_tpu() -> None:
    with pytest.raises(PjrtError, match="no TPU chip is attached to this machine, and none is emulated"):
        EmulatedHost.read({})


@pytest.mark.parametrize("text", ["v4", "v9:2x2x1", "v4:2x2"])
def test_a_host_that_is_not_described_has_no_tpu(text: str) -> None:
    with pytest.raises(
        PjrtError, match=f"POLYXLA_LIBTPU_HOST='{text}' does not describe the chips of a host"
    ):
        host(text)


@pytest.mark.parametrize(
    ("flag", "is_spmd"),
    # What xr.is_spmd() returns.
    [("1", True), ("true", True), ("2", True), ("", False), ("0", False), ("True", False), ("yes", False)],
)
def test_an_spmd_program_has_the_variables_of_its_host_in_the_slice(flag: str, is_spmd: bool) -> None:
    environ = {"XLA_USE_SPMD": flag, "POLYXLA_LIBTPU_SLICE": "TPU_HOST_BOUNDS=1,1,2 TPU_WORKER_ID=1"}
    given = {"TPU_HOST_BOUNDS": "1,1,2", "TPU_WORKER_ID": "1"}
    assert in_slice(environ) == environ | (given if is_spmd else {})
    described = environ | {"TPU_PROCESS_BOUNDS": "1,1,1"}
    assert in_slice(described) == described


def test_a_chip_belongs_to_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = host("v4:2x2x1").generation
    here, other = EmulatedHost(generation, (2, 2, 1), "here"), EmulatedHost(generation, (2, 2, 1), "other")
    alone = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}
    held: list[int] = []
    monkeypatch.setattr(client, "_held", held)
    try:
        client.claim(Topology.read(alone | {"TPU_VISIBLE_CHIPS": "1"}, here), here)
        client.claim(Topology.read(alone | {"TPU_VISIBLE_CHIPS": "2"}, here), here)
        client.claim(Topology.read(alone | {"TPU_VISIBLE_CHIPS": "1"}, other), other)
        in_use = rf"The TPU is already in use by process with pid {os.getpid()}\. .*accel1"
        with pytest.raises(PjrtError, match=in_use):
            client.claim(Topology.read(alone | {"TPU_VISIBLE_CHIPS": "1"}, here), here)
    finally:
        for descriptor in held:
            os.close(descriptor)


def on_slice(slice_id: int) -> dict[str, str]:
    return {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": str(slice_id),
        "MEGASCALE_COORDINATOR_ADDRESS": "127.1.1.1:8080",
    }


def test_replicas_count_through_the_slices_of_a_job() -> None:
    environs = [{**own, **on_slice(slice_id)} for slice_id in range(2) for own in one_chip_each("2,2,1", 4)]
    here = host("v4:2x2x1")
    assert numbers(here, environs) == [(number,) for number in (0, 2, 1, 3, 4, 6, 5, 7)]
    last = Topology.read(environs[-1], here)
    assert (last.task, last.process, last.process_count) == (3, 7, 8)
    assert last.places(here) == (Coordinates(1, 1, 0, 0, 1),)
    chosen = client.settings(last, here, BridgeSettings(secret="a"))
    assert (chosen.process, chosen.processes, chosen.replicas) == (7, 8, 8)
    assert chosen.coordinator == "127.1.1.1:8080"


@pytest.mark.parametrize(
    "variables",
    [
        {"MEGASCALE_NUM_SLICES": "1"},
        {"MEGASCALE_SLICE_ID": ""},
        {"MEGASCALE_COORDINATOR_ADDRESS": ""},
        {"SKIP_MEGASCALE_PJRT_CLIENT": "true"},
    ],
    ids=["one", "no number", "no coordinator", "skipped"],
)
def test_a_slice_is_a_job_of_its_own(variables: dict[str, str]) -> None:
    here = host("v4:2x2x1")
    alone = Topology.read({**on_slice(1), **variables}, here)
    assert alone.process_count == 1
    assert {place.slice_index for place in alone.places(here)} == {None}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MEGASCALE_SLICE_ID": "2"}, "MEGASCALE_SLICE_ID=2 is not one of 2 slices"),
        ({"MEGASCALE_NUM_SLICES": "two"}, "MEGASCALE_NUM_SLICES=two is not numbers"),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "a"}, "MEGASCALE_COORDINATOR_ADDRESS=a is not host:port"),
    ],
)
def test_slices_that_are_described_wrongly_are_refused(variables: dict[str, str], expected: str) -> None:
    with pytest.raises(PjrtError, match=expected):
        Topology.read({**on_slice(1), **variables}, host("v4:2x2x1"))
