"""A job as data: the variables of each host."""

from __future__ import annotations

from typing import Any

from polyxla_pod.job import PodJob
from polyxla_pod.messages import HostMessage, decode


def job(*hosts: str, **fields: Any) -> PodJob:
    return PodJob(("python", "train.py"), hosts, tuple(name.rpartition("@")[2] for name in hosts), **fields)


def test_the_runtime_becomes_a_variable_and_the_users_value_wins() -> None:
    assert job("a", runtime="pjrt").environ_of(0) == {"POLYXLA_RUNTIME": "pjrt"}
    both = job("a", environ={"POLYXLA_RUNTIME": "torchtpu"}, runtime="pjrt")
    assert both.environ_of(0) == {"POLYXLA_RUNTIME": "torchtpu"}


def test_a_value_can_have_the_hosts_number() -> None:
    found = job("a", "b", environ={"RANK": "{host}", "OTHER": "{hosts}"}).environ_of(1)
    assert found == {"RANK": "1", "OTHER": "{hosts}"}


def test_the_hosts_of_an_emulated_slice_know_their_number_and_each_other() -> None:
    emulate = {"POLYXLA_EMULATE": "v4-16"}
    assert job("me@10.0.0.1", "10.0.0.2", environ=emulate).environ_of(1) == {
        "POLYXLA_EMULATE": "v4-16",
        "POLYXLA_EMULATE_HOST": "1",
        "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2",
    }
    assert "POLYXLA_EMULATE_HOST" not in job("a", environ=emulate).environ_of(0)


def test_the_hosts_of_emulated_slices_know_those_of_their_own_and_where_all_meet() -> None:
    environ = job("a", "b", "c", "d", environ={"POLYXLA_EMULATE": "2xv4-16"}).environ_of(3)
    assert environ == {
        "POLYXLA_EMULATE": "2xv4-16",
        "POLYXLA_EMULATE_HOST": "3",
        "TPU_WORKER_HOSTNAMES": "c,d",
        "MEGASCALE_COORDINATOR_ADDRESS": "a",
    }


def test_a_message_is_one_line_and_comes_back() -> None:
    message = HostMessage("line", {"text": "two\nlines \u2028 \ud800", "host": 3})
    line = message.encode()
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_what_a_shell_prints_is_not_a_message() -> None:
    assert decode(b"Welcome to Debian\n") is None
    assert decode(b'{"polyxla_pod": broken\n') is None
    assert decode(b'{"polyxla_pod":"hello", broken\n') is None
