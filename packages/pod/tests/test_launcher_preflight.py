"""The preflight's comparison of the hosts' facts: pure."""

from __future__ import annotations

from typing import Any

import pytest

from polyxla_pod.job import PodJob
from polyxla_pod.launcher.preflight import FREE_BYTES, find_problems, ports, questions

GOOD: dict[str, Any] = {
    "versions": {"polyxla-core": "1.0", "torch": "2.9.1", "libtpu": "0.0.21"},
    "holders": [],
    "node": None,
    "used_ports": [],
    "free_bytes": {"/here": 10 * FREE_BYTES, "/tmp": FREE_BYTES},
}


def hosts(count: int, *, chips: bool = True) -> list[dict[str, Any]]:
    def worker(number: int) -> dict[str, Any] | None:
        return {"id": number, "hosts": count, "type": "v4-32"} if chips else None

    return [{**GOOD, "worker": worker(number)} for number in range(count)]


def problems(facts: list[dict[str, Any]], clocks: list[float] | None = None) -> list[tuple[int | None, str]]:
    found = find_problems(facts, clocks or [0.0] * len(facts), "1.0")
    return [(problem.host, problem.text) for problem in found]


@pytest.mark.parametrize("chips", [True, False])
def test_equal_hosts_have_no_problem(chips: bool) -> None:
    assert problems(hosts(4, chips=chips)) == []


def test_other_versions_are_named_with_the_usual_one() -> None:
    facts = hosts(4)
    facts[2]["versions"] = {**GOOD["versions"], "torch": "2.9.0"}
    facts[3]["versions"] = {name: one for name, one in GOOD["versions"].items() if name != "libtpu"}
    assert problems(facts) == [
        (2, "has torch 2.9.0, most hosts have 2.9.1. Install torch==2.9.1 on it."),
        (3, "does not have libtpu, most hosts have 0.0.21. Install libtpu==0.0.21 on it."),
    ]


def test_polyxla_has_the_version_of_the_launcher() -> None:
    facts = hosts(1, chips=False)
    facts[0]["versions"] = {**GOOD["versions"], "polyxla-core": "0.9"}
    assert problems(facts) == [
        (0, "has polyxla-core 0.9, this machine has 1.0. Install polyxla-core==1.0 on it.")
    ]


def test_a_package_that_only_one_host_has_is_named() -> None:
    facts = hosts(3)
    facts[1]["versions"] = {**GOOD["versions"], "torch_tpu": "0.2"}
    assert problems(facts) == [(1, "has torch_tpu 0.2, most hosts have none. Uninstall torch_tpu there.")]


def test_holders_of_chips_are_named() -> None:
    facts = hosts(2)
    facts[1]["holders"] = ["process 7 (python old.py) has /dev/accel0 open"]
    ((host, text),) = problems(facts)
    assert host == 1
    assert text.startswith("the chips are in use: process 7 (python old.py)")


def test_a_missing_worker_is_named() -> None:
    assert problems(hosts(4)[:3]) == [
        (None, "the v4-32 has 4 hosts, and worker 3 is missing. Add its host to --hosts.")
    ]


def test_a_worker_that_is_there_twice_is_named() -> None:
    facts = hosts(2)
    facts[1]["worker"]["id"] = 0
    ((host, text),) = problems(facts)
    assert (host, text.partition(".")[0]) == (1, "is worker 0 of its slice, and so is w0")


def test_a_host_of_another_slice_or_without_chips_is_named() -> None:
    facts = hosts(3)
    facts[1]["worker"] = {"id": 1, "hosts": 2, "type": "v4-16"}
    assert problems(facts)[0] == (1, "belongs to a v4-16, w0 to a v4-32. Name the hosts of one slice.")
    facts[1]["worker"] = None
    assert problems(facts) == [(1, "has no TPU chips, other hosts have. Leave it out of --hosts.")]
    facts[1]["worker"] = {"error": "the slice's type is not given."}
    assert problems(facts) == [(1, "the slice's type is not given.")]


def test_a_used_port_counts_only_where_there_are_chips() -> None:
    for chips in (True, False):
        facts = hosts(2, chips=chips)
        facts[0]["used_ports"] = [8490]
        assert [host for host, _ in problems(facts)] == [0] * chips


def test_a_full_disk_is_named() -> None:
    facts = hosts(2)
    facts[1]["free_bytes"] = {"/tmp": FREE_BYTES // 4}
    assert problems(facts) == [(1, "0.25 GiB are free in /tmp. Make 1 GiB free.")]


def test_a_wrong_clock_is_named_among_the_hosts() -> None:
    # The launcher's own clock is wrong by a minute.
    ((host, text),) = problems(hosts(3), [60.1, 60.0, 48.0])
    assert host == 2
    assert text.startswith("its clock is 12.0 s behind the others.")


def test_the_ports_are_the_monitors_and_libtpus() -> None:
    assert ports({}) == [8490, *range(8476, 8484)]
    assert ports({"POLYXLA_MONITOR_PORT": "9000"})[0] == 9000


def node_job(**fields: Any) -> PodJob:
    return PodJob(("true",), ("a", "b"), ("10.0.0.1", "10.0.0.2"), runtime="xrt", **fields)


def test_a_host_that_drives_a_node_is_asked_for_its_address_and_its_worker() -> None:
    node = {"address": "10.0.0.2", "first": "10.0.0.1", "worker_port": 8470, "is_alone": False}
    assert questions(node_job(), 1)["node"] == node
    assert [questions(node_job(), host)["ports"] for host in range(2)] == [[8477], []]
    started = node_job(starts_workers=True, worker_port=9000)
    assert questions(started, 1)["node"] == {**node, "worker_port": None}
    assert [questions(started, host)["ports"] for host in range(2)] == [[9000, 8477], [9000]]


def test_what_the_user_describes_is_not_asked_for() -> None:
    mesh = {"XRT_MESH_SERVICE_ADDRESS": "10.0.0.1:1"}
    assert questions(node_job(environ=mesh), 0)["ports"] == []
    own = {**mesh, "XRT_TPU_CONFIG": "w;0;c:1|w;1;d:1", "XRT_LOCAL_WORKER": "w:{host}"}
    assert questions(node_job(environ=own), 0)["node"] is None


def node_facts_of(**wrong: str | None) -> list[dict[str, Any]]:
    versions = {**GOOD["versions"], "polyxla-runtime-xrt": "1.0"}
    facts = hosts(2, chips=False)
    return [
        {**host, "versions": versions, "node": {"address": None, "worker": None, **wrong}} for host in facts
    ]


def test_a_nodes_address_and_worker_are_named() -> None:
    assert problems(node_facts_of()) == []
    address = "does not know the address b: Name or service not known"
    fix = "Name the hosts by addresses that all of them know, such as --hosts 10.0.0.2,10.0.0.3."
    assert problems(node_facts_of(address=address)) == [(host, f"{address}. {fix}") for host in range(2)]
    worker = "10.0.0.2:8470: Connection refused"
    fix = "Start one there with `polyxla worker`, or pass --workers."
    found = problems(node_facts_of(worker=worker))
    assert found == [(host, f"no worker listens at {worker}. {fix}") for host in range(2)]


def test_a_used_port_counts_where_a_worker_will_listen() -> None:
    facts = node_facts_of()
    facts[1]["used_ports"] = [8470]
    ((host, text),) = problems(facts)
    assert host == 1
    assert text.startswith("port 8470 is in use.")
