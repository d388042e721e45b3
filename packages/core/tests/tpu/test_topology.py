"""The variables of every process. Expected values were worked out by hand, most from torch_xla's rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyxla.errors import DevicesError, UsageError
from polyxla.tpu.accelerators import GENERATIONS, AcceleratorType, Bounds, sizes
from polyxla.tpu.topology import process_addresses, process_environments, single_core_environment

TYPES = [f"{generation}-{size}" for generation in GENERATIONS for size in sizes(generation)]
SMALL_TYPES = [name for name in TYPES if int(name.split("-")[1]) <= 512]


def accelerator(name: str) -> AcceleratorType:
    return AcceleratorType.parse(name, "here")


def hosts(count: int) -> list[str]:
    return [f"10.0.0.{i}" for i in range(count)]


def test_the_environment_of_one_v3_host() -> None:
    addresses = "localhost:8476,localhost:8477,localhost:8478,localhost:8479"
    assert process_environments(accelerator("v3-8")) == tuple(
        {
            "TPU_PROCESS_BOUNDS": "2,2,1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_ADDRESSES": addresses,
            "TPU_PROCESS_PORT": port,
            "CLOUD_TPU_TASK_ID": rank,
            "TPU_VISIBLE_CHIPS": rank,
        }
        for rank, port in [("0", "8476"), ("1", "8477"), ("2", "8478"), ("3", "8479")]
    )


def test_the_environment_of_worker_1_of_a_v3_32() -> None:
    found = process_environments(accelerator("v3-32"), worker_id=1, hostnames=["a", "b", "c", "d"])
    assert found[2] == {
        "TPU_PROCESS_BOUNDS": "4,4,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": "a:8476,a:8477,a:8478,a:8479,b:8476,b:8477,b:8478,b:8479,"
        "c:8476,c:8477,c:8478,c:8479,d:8476,d:8477,d:8478,d:8479",
        "TPU_PROCESS_PORT": "8478",
        "CLOUD_TPU_TASK_ID": "6",
        "TPU_VISIBLE_CHIPS": "2",
    }


# type, number of hosts, processes per host, process bounds, task ids of the last worker
@pytest.mark.parametrize(
    ("name", "host_count", "processes", "bounds", "task_ids"),
    [
        ("v2-8", 1, 4, "2,2,1", (0, 3)),
        ("v2-512", 64, 4, "16,16,1", (252, 255)),
        ("v3-2048", 256, 4, "32,32,1", (1020, 1023)),
        ("v4-8", 1, 4, "2,2,1", (0, 3)),
        ("v4-16", 2, 4, "2,2,2", (4, 7)),
        ("v4-32", 4, 4, "2,2,4", (12, 15)),
        ("v4-256", 32, 4, "4,4,8", (124, 127)),
        ("v4-4096", 512, 4, "8,16,16", (2044, 2047)),
        ("v5e-1", 1, 1, "1,1,1", (0, 0)),
        ("v5e-4", 1, 4, "2,2,1", (0, 3)),
        ("v5e-8", 1, 8, "2,4,1", (0, 7)),
        ("v5e-16", 4, 4, "4,4,1", (12, 15)),
        ("v5e-128", 32, 4, "8,16,1", (124, 127)),
        ("v5p-64", 8, 4, "2,4,4", (28, 31)),
        ("v5p-12288", 1536, 4, "16,16,24", (6140, 6143)),
        ("v6e-8", 1, 8, "2,4,1", (0, 7)),
        ("v6e-256", 64, 4, "16,16,1", (252, 255)),
        ("tpu7x-8", 1, 4, "2,2,1,2", (0, 3)),
        ("tpu7x-64", 8, 4, "2,4,4,2", (28, 31)),
    ],
)
def test_bounds_and_task_ids_of_each_type(
    name: str, host_count: int, processes: int, bounds: str, task_ids: tuple[int, int]
) -> None:
    found = process_environments(
        accelerator(name), worker_id=host_count - 1, hostnames=[f"h{i}" for i in range(host_count)]
    )
    assert len(found) == processes
    assert {variables["TPU_PROCESS_BOUNDS"] for variables in found} == {bounds}
    assert (int(found[0]["CLOUD_TPU_TASK_ID"]), int(found[-1]["CLOUD_TPU_TASK_ID"])) == task_ids


@given(name=st.sampled_from(SMALL_TYPES), base_port=st.integers(1024, 60000))
def test_task_ids_and_addresses_are_complete_and_unique_over_all_workers(name: str, base_port: int) -> None:
    kind = accelerator(name)
    names = [f"h{i}" for i in range(kind.hosts)]
    everything = [
        variables
        for worker_id in range(kind.hosts)
        for variables in process_environments(kind, worker_id=worker_id, hostnames=names, base_port=base_port)
    ]
    assert [int(v["CLOUD_TPU_TASK_ID"]) for v in everything] == list(range(kind.chips))
    (addresses,) = {v["TPU_PROCESS_ADDRESSES"] for v in everything}
    assert len(set(addresses.split(","))) == kind.chips
    (bounds,) = {v["TPU_PROCESS_BOUNDS"] for v in everything}
    # A fourth number is that of the devices of a chip.
    assert math.prod(map(int, bounds.split(",")[:3])) == kind.chips
    for variables in everything:
        own = addresses.split(",")[int(variables["CLOUD_TPU_TASK_ID"])]
        assert own.endswith(f":{variables['TPU_PROCESS_PORT']}")


@given(name=st.sampled_from(TYPES))
def test_any_slice_can_be_described_as_one_host(name: str) -> None:
    kind = accelerator(name)
    found = process_environments(kind, bounds=kind.bounds.on_one_host(), local_processes=kind.chips)
    assert len(found) == kind.chips
    assert [int(v["CLOUD_TPU_TASK_ID"]) for v in found] == list(range(kind.chips))
    assert len(set(found[0]["TPU_PROCESS_ADDRESSES"].split(","))) == kind.chips
    assert found[0]["TPU_PROCESS_BOUNDS"].split(",")[:3] == [str(size) for size in kind.bounds.chips]


@given(name=st.sampled_from(TYPES), data=st.data())
def test_every_core_maps_to_one_chip_and_device(name: str, data: st.DataObject) -> None:
    kind = accelerator(name)
    count = kind.chips_per_host * kind.threads_per_process
    core = data.draw(st.integers(0, count - 1))
    variables, local_index = single_core_environment(core, kind)
    assert int(variables["TPU_VISIBLE_CHIPS"]) * kind.threads_per_process + local_index == core
    assert 0 <= local_index < kind.threads_per_process


def test_given_bounds_override_the_type() -> None:
    flat = Bounds((1, 1, 8), (2, 2, 1))
    found = process_environments(accelerator("v4-64"), bounds=flat, worker_id=7, hostnames=hosts(8))
    assert found[3]["TPU_PROCESS_BOUNDS"] == "2,2,8"
    assert found[3]["CLOUD_TPU_TASK_ID"] == "31"


def test_a_v5e_8_can_be_two_hosts() -> None:
    found = process_environments(
        accelerator("v5e-8"), bounds=Bounds((1, 2, 1), (2, 2, 1)), worker_id=1, hostnames=hosts(2)
    )
    assert [v["CLOUD_TPU_TASK_ID"] for v in found] == ["4", "5", "6", "7"]
    assert {v["TPU_PROCESS_BOUNDS"] for v in found} == {"2,4,1"}


def test_chosen_chips_are_spread_over_the_processes() -> None:
    two = Bounds((1, 1, 1), (1, 2, 1))
    found = process_environments(accelerator("v4-8"), bounds=two, chips=[2, 3])
    assert [v["TPU_VISIBLE_CHIPS"] for v in found] == ["2", "3"]
    assert [v["CLOUD_TPU_TASK_ID"] for v in found] == ["0", "1"]
    assert {v["TPU_PROCESS_BOUNDS"] for v in found} == {"1,2,1"}


@pytest.mark.parametrize(
    ("first", "second"), [([0, 1], [2, 3]), ([0, 2], [1, 3]), ([0], [1, 3]), ([3, 1], [0])]
)
def test_jobs_on_different_chips_of_a_host_have_different_ports(first: list[int], second: list[int]) -> None:
    def ports(chips: list[int]) -> list[str]:
        bounds = Bounds((1, 1, 1), (1, len(chips), 1))
        found = process_environments(accelerator("v4-8"), bounds=bounds, chips=chips)
        own = [variables["TPU_PROCESS_PORT"] for variables in found]
        assert {v["TPU_PROCESS_ADDRESSES"] for v in found} == {",".join(f"localhost:{port}" for port in own)}
        return own

    assert ports(first) == [str(8476 + chip) for chip in first]
    assert not set(ports(first)) & set(ports(second))


def test_the_ports_of_several_hosts_do_not_depend_on_the_chips() -> None:
    found = process_environments(accelerator("v4-16"), worker_id=1, hostnames=["a", "b"], chips=[3, 2, 1, 0])
    assert [v["TPU_PROCESS_PORT"] for v in found] == ["8476", "8477", "8478", "8479"]


@pytest.mark.parametrize(
    ("hostnames", "addresses"),
    [
        (["10.0.0.5"], ["localhost:8476", "localhost:8477"]),
        (["a", "b"], ["a:8476", "a:8477", "b:8476", "b:8477"]),
        (["fd00::1", "[fd00::2]"], ["[fd00::1]:8476", "[fd00::1]:8477", "[fd00::2]:8476", "[fd00::2]:8477"]),
    ],
)
def test_addresses_follow_the_worker_ids(hostnames: list[str], addresses: list[str]) -> None:
    assert process_addresses(hostnames, [8476, 8477]) == addresses


@pytest.mark.parametrize(
    ("name", "core", "chip", "local_index", "port"),
    [
        ("v3-8", 0, "0", 0, "8476"),
        ("v3-8", 5, "2", 1, "8478"),
        ("v3-32", 7, "3", 1, "8479"),
        ("v4-8", 3, "3", 0, "8479"),
        ("v5e-8", 7, "7", 0, "8483"),
        ("v6e-1", 0, "0", 0, "8476"),
    ],
)
def test_the_environment_of_a_single_core(
    name: str, core: int, chip: str, local_index: int, port: str
) -> None:
    assert single_core_environment(core, accelerator(name)) == (
        {
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
            "TPU_PROCESS_PORT": port,
            "CLOUD_TPU_TASK_ID": "0",
            "TPU_VISIBLE_CHIPS": chip,
        },
        local_index,
    )


@pytest.mark.parametrize(("name", "core"), [("v3-8", 8), ("v3-32", 8), ("v4-8", 4), ("v4-8", -1)])
def test_a_core_that_the_host_does_not_have_is_refused(name: str, core: int) -> None:
    with pytest.raises(DevicesError, match=r"devices=\["):
        single_core_environment(core, accelerator(name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hostnames": ["a"]}, "has 4 hosts .2,2,1., but 1 name of hosts"),
        ({"hostnames": ["a", "b", "c", "d", "e"]}, "but 5 names"),
        ({"hostnames": ["a", "b", "a", "c"]}, "more than one worker has the name a"),
        ({"worker_id": 4}, "worker id '4' does not fit a slice of 4 hosts"),
        ({"worker_id": -1}, "worker id '-1' does not fit"),
        ({"local_processes": 8}, "has 4 chips, so it needs as many processes, not 8"),
        ({"chips": [0, 1, 2]}, "each of 4 processes needs a chip of its own"),
        ({"chips": [0, 1, 2, 2]}, "each of 4 processes"),
        ({"chips": [-1, 1, 2, 3]}, "each of 4 processes"),
        ({"base_port": 65533}, "the ports from 65533 to 65536 do not exist.* from 1 to 65532"),
        ({"base_port": 0}, "the ports from 0 to 3 do not exist"),
    ],
)
def test_contradicting_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        process_environments(accelerator("v3-32"), **{"hostnames": hosts(4), **arguments})


def test_the_last_ports_can_be_used() -> None:
    found = process_environments(accelerator("v3-8"), base_port=65532)
    assert found[-1]["TPU_PROCESS_PORT"] == "65535"
