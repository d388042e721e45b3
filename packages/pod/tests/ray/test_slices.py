"""Slices from a cluster's nodes: order, choice, and what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from polyxla import UsageError
from polyxla_pod.ray.cluster import choose, find_slices


def node(worker: int, name: str = "my-tpu", kind: str = "v4-16", *, alive: bool = True) -> dict[str, Any]:
    labels = {"slice-name": name, "worker-id": str(worker), "pod-type": kind}
    return {
        "NodeID": f"{name}-{worker}",
        "Alive": alive,
        "NodeManagerAddress": f"10.0.0.{worker}",
        "Resources": {"TPU": 4.0, "CPU": 8.0},
        "Labels": {f"ray.io/tpu-{label}": value for label, value in labels.items()},
    }


HEAD = {
    "NodeID": "head",
    "Alive": True,
    "NodeManagerAddress": "10.0.1.1",
    "Resources": {"CPU": 8.0},
    "Labels": {},
}


def refusal(nodes: list[dict[str, Any]], name: str | None = None, kind: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        choose(find_slices(nodes), name, kind)
    return str(caught.value)


def test_hosts_are_in_the_order_of_their_worker_ids() -> None:
    chosen = choose(find_slices([node(1), HEAD, node(0)]), None, None)
    assert [(host.address, host.worker, host.chips) for host in chosen.hosts] == [
        ("10.0.0.0", 0, 4.0),
        ("10.0.0.1", 1, 4.0),
    ]
    # A node that replaces another one has the same.
    labels = {"ray.io/tpu-slice-name": "my-tpu", "ray.io/tpu-worker-id": "1"}
    assert chosen.hosts[1].labels == labels


def test_a_cluster_without_chips_is_an_error() -> None:
    assert "no node of the Ray cluster has TPU chips" in refusal([HEAD, node(0, alive=False)])


@pytest.mark.parametrize(
    ("workers", "problem"),
    [
        ([0], "no node is worker 1"),
        ([1], "no node is worker 0"),
        ([0, 1, 1], "several nodes say that they are worker 1"),
    ],
)
def test_a_slice_that_is_not_whole_is_an_error(workers: list[int], problem: str) -> None:
    assert f"host(s)) is not whole: {problem}" in refusal([node(worker) for worker in workers])


def test_a_whole_slice_is_chosen_before_one_that_is_not() -> None:
    nodes = [node(0, "a"), node(0, "b"), node(1, "b")]
    assert choose(find_slices(nodes), None, None).name == "b"
    assert "the slice a (v4-16, 1 host(s)) is not whole" in refusal(nodes, "a")


def test_one_of_several_slices_is_chosen_by_name_or_type() -> None:
    nodes = [node(0, "a", "v4-8"), node(0, "b"), node(1, "b")]
    assert choose(find_slices(nodes), "b", None).name == "b"
    assert choose(find_slices(nodes), None, "v4-8").name == "a"
    assert "has 2 such TPUs" in refusal(nodes)
    assert "--tpu NAME: a (v4-8, 1 host(s)); b (v4-16, 2 host(s))." in refusal(nodes)
    assert "has no such TPU (from --tpu c type=v4-8)" in refusal(nodes, "c", "v4-8")


def test_a_node_without_a_slice_is_one_of_its_own() -> None:
    plain = {**HEAD, "Resources": {"TPU": 8.0}}
    chosen = choose(find_slices([plain]), None, None)
    assert [host.labels for host in chosen.hosts] == [{"ray.io/node-id": "head"}]


def test_the_number_of_hosts_of_an_unknown_type_is_not_checked() -> None:
    assert len(choose(find_slices([node(0, kind="v99-1"), node(1, kind="v99-1")]), None, None).hosts) == 2
