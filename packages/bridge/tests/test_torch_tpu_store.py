"""The store of TorchTPU's groups, over stores of torch.distributed."""

from __future__ import annotations

from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from polyxla_bridge import transfers
from polyxla_bridge.torch_tpu_store import TransferStore

KEY = "cross_host_transfer_descriptor:7"


@pytest.fixture
def job() -> Store:
    return HashStore()


def of_rank(job: Store, group: str = "0") -> Any:
    """What TorchTPU gets as the store of a group: one object in each process."""
    return TransferStore(PrefixStore("tpu/", PrefixStore(group, job)), f"group-{group}").for_group()


def look(ticket: bytes) -> bytes | None:
    return transfers._tickets[ticket]()


def test_the_nth_recv_meets_the_nth_send_whoever_is_first(job: Store) -> None:
    sender, receiver = of_rank(job), of_rank(job)
    receiver.multi_set([KEY], [b"first"])
    receiver.multi_set([KEY], [b"second"])
    tickets = [sender.multi_get([KEY])[0] for _ in range(3)]
    assert look(tickets[1]) == b"second"
    assert look(tickets[0]) == b"first"
    assert look(tickets[2]) is None
    receiver.multi_set([KEY], [b"third"])
    assert look(tickets[2]) == b"third"


def test_a_descriptor_that_was_read_is_deleted(job: Store) -> None:
    sender, receiver = of_rank(job), of_rank(job)
    before = job.num_keys()
    receiver.multi_set([KEY], [b"\xff\0"])
    assert look(sender.multi_get([KEY])[0]) == b"\xff\0"
    assert job.num_keys() == before


def test_groups_and_keys_do_not_mix(job: Store) -> None:
    first, second = of_rank(job, "0"), of_rank(job, "1")
    first.multi_set([KEY, f"{KEY}1"], [b"a", b"b"])
    assert look(second.multi_get([KEY])[0]) is None
    assert [look(ticket) for ticket in of_rank(job, "0").multi_get([f"{KEY}1", KEY])] == [b"b", b"a"]


def test_other_keys_are_the_groups_own(job: Store) -> None:
    store, group = of_rank(job), PrefixStore("tpu/", PrefixStore("0", job))
    store.set("rank", "3")
    store.multi_set(["one", "two"], [b"1", b"2"])
    assert group.get("rank") == b"3"
    assert store.multi_get(["two", "one"]) == [b"2", b"1"]
    assert store.add("count", 2) == 2
    assert store.check(["rank", "one"])
    assert not store.check(["three"])
    store.wait(["rank"])
    assert store.compare_set("rank", "3", "4") == b"4"
    assert store.delete_key("rank")


def test_below_the_prefix_is_the_jobs_store(job: Store) -> None:
    store = of_rank(job)
    store._underlying_non_prefix_store.set("subgroups", "all")
    assert job.get("subgroups") == b"all"
