"""A job as data: the variables of each host."""

from __future__ import annotations

from polyxla_pod.job import Job
from polyxla_pod.messages import Message, decode

COMMAND = ("python", "train.py")


def test_the_runtime_becomes_a_variable_and_the_users_value_wins() -> None:
    assert Job(COMMAND, ("a",), runtime="xrt").environ_of(0) == {"POLYXLA_RUNTIME": "xrt"}
    job = Job(COMMAND, ("a",), {"POLYXLA_RUNTIME": "pjrt"}, runtime="xrt")
    assert job.environ_of(0) == {"POLYXLA_RUNTIME": "pjrt"}


def test_a_value_can_have_the_hosts_number() -> None:
    job = Job(COMMAND, ("a", "b"), {"RANK": "{host}", "OTHER": "{hosts}"})
    assert job.environ_of(1) == {"RANK": "1", "OTHER": "{hosts}"}


def test_the_hosts_of_an_emulated_slice_know_their_number_and_each_other() -> None:
    job = Job(COMMAND, ("me@10.0.0.1", "10.0.0.2"), {"POLYXLA_EMULATE": "v4-16"})
    assert job.environ_of(1) == {
        "POLYXLA_EMULATE": "v4-16",
        "POLYXLA_EMULATE_HOST": "1",
        "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2",
    }
    assert "POLYXLA_EMULATE_HOST" not in Job(COMMAND, ("a",), {"POLYXLA_EMULATE": "v4-16"}).environ_of(0)


def test_a_message_is_one_line_and_comes_back() -> None:
    message = Message("line", {"text": "two\nlines \u2028 \ud800", "host": 3})
    line = message.encode()
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_what_a_shell_prints_is_not_a_message() -> None:
    assert decode(b"Welcome to Debian\n") is None
    assert decode(b'{"polyxla_pod": broken\n') is None
    assert decode(b'{"polyxla_pod":"hello", broken\n') is None
