"""The monitors of several hosts' launches, and their processes' connections, all in this process."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from polyxla import PolyxlaError, ReplicaLostError, StalledError, UsageError
from polyxla.env import POLYXLA_SECRET
from polyxla.launcher.ports import free_ports
from polyxla.tpu import env
from polyxla.tpu.monitor.connection import SealedConnection
from polyxla.tpu.monitor.server import TICK_S, HostFailure, Hosts, Monitor, monitored

PATIENCE_S = 30.0
SECRET = "of one job"
NAMES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
WAITING = {"in_device": True, "seconds": 9, "line": "train.py:7"}
ELSEWHERE = {"in_device": False, "seconds": 9, "line": "train.py:3"}


class Slice:
    """The monitors of a slice's hosts, by number."""

    def __init__(self, stall_timeout_s: float = 5, start_timeout_s: float = 60) -> None:
        self._timeouts = stall_timeout_s, start_timeout_s
        (self.port,) = free_ports(1)
        self.monitors: dict[int, Monitor] = {}
        self._processes: list[SealedConnection] = []

    def start(self, *hosts: int) -> None:
        for host in hosts:
            self.monitors[host] = Monitor(Hosts(NAMES, host, self.port), SECRET, *self._timeouts)

    def process(self, host: int) -> SealedConnection:
        """Connect as a process of a host does."""
        connection = SealedConnection.open(self.monitors[host].address, SECRET, PATIENCE_S)
        connection.send("process")
        self._processes.append(connection)
        return connection

    def end(self, host: int, failure: HostFailure | None = None) -> None:
        self.monitors.pop(host).close(failure)

    def vanish(self, host: int) -> None:
        """End a host's launch without a word, as SIGKILL does."""
        monitor = self.monitors.pop(host)
        monitor._others.clear()
        monitor.close(None)

    def close(self) -> None:
        for host in list(self.monitors):
            self.end(host)
        for process in self._processes:
            process.close()


@pytest.fixture
def tpu() -> Iterator[Slice]:
    with contextlib.closing(Slice()) as started:
        yield started


def received(process: SealedConnection) -> dict[str, Any]:
    ready, _, _ = select.select([process], [], [], PATIENCE_S)
    assert ready, "nothing arrived"
    (message,) = process.receive()
    return message


def is_quiet(process: SealedConnection) -> bool:
    return not select.select([process], [], [], 1.0)[0]


FAILED = HostFailure(1, 7, "host 1 (127.0.0.2) failed: ValueError: no data")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_host_that_fails_is_named_on_all_others(tpu: Slice, failing: int) -> None:
    tpu.start(0, 1, 2)
    processes = {host: tpu.process(host) for host in range(3) if host != failing}
    for process in processes.values():
        # So that all monitors are connected.
        process.send("account", ordinal=0, **ELSEWHERE)
    wait_for_connections(tpu)
    failure = HostFailure(failing, 7, f"host {failing} failed")
    tpu.end(failing, failure)
    for process in processes.values():
        assert received(process) == {
            "kind": "failed",
            "host": failing,
            "code": 7,
            "text": f"host {failing} failed",
        }
    for monitor in tpu.monitors.values():
        assert monitor.wait_for_failure(PATIENCE_S) == failure


def wait_for_connections(tpu: Slice) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(len(monitor._others) < (2 if host == 0 else 1) for host, monitor in tpu.monitors.items()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_that_vanishes_is_named_on_all_others(tpu: Slice, gone: int) -> None:
    tpu.start(0, 1, 2)
    processes = [tpu.process(host) for host in range(3) if host != gone]
    wait_for_connections(tpu)
    tpu.vanish(gone)
    for process in processes:
        text = f"host {gone} ({NAMES[gone]}) is gone: its launching process ended"
        assert received(process) == {"kind": "failed", "host": gone, "code": 1, "text": text}


def test_a_host_that_starts_late_learns_of_the_failure(tpu: Slice) -> None:
    tpu.start(0, 1)
    tpu.end(1, FAILED) if connected(tpu, 1) else pytest.fail("not connected")
    assert tpu.monitors[0].wait_for_failure(PATIENCE_S) == FAILED
    tpu.start(2)
    assert tpu.monitors[2].wait_for_failure(PATIENCE_S) == FAILED
    # Its processes, too, may connect later.
    assert received(tpu.process(2))["text"] == FAILED.text


def connected(tpu: Slice, host: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not tpu.monitors[host]._others:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_the_end_of_a_host_that_succeeds_ends_no_other(tpu: Slice) -> None:
    tpu.start(0, 1, 2)
    processes = [tpu.process(host) for host in range(3)]
    wait_for_connections(tpu)
    tpu.end(1)
    tpu.end(0)
    assert is_quiet(processes[2])
    assert tpu.monitors[2].failure is None


def test_replicas_of_one_host_wait_for_one_of_another(tpu: Slice) -> None:
    tpu.start(0, 1, 2)
    processes = [tpu.process(host) for host in range(3)]
    wait_for_connections(tpu)
    processes[1].send("account", ordinal=4, **ELSEWHERE)
    processes[2].send("account", ordinal=8, **WAITING)
    for process in processes:
        message = received(process)
        assert (message["kind"], message["waiting"]) == ("stalled", [8])
        assert message["text"].startswith(
            "replica 8 waits at train.py:7; replica 4 on host 1 (127.0.0.2) is at train.py:3, with no work"
        )


def test_replicas_that_wait_for_those_of_host_0_are_found_after_its_end(tpu: Slice) -> None:
    tpu._timeouts = (0.5, 60)
    tpu.start(0, 1, 2)
    processes = [tpu.process(host) for host in range(3)]
    wait_for_connections(tpu)
    processes[0].send("account", ordinal=0, in_device=False, has_returned=True)
    deadline = time.monotonic() + PATIENCE_S
    while tpu.monitors[0]._accounts.returned != [0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    tpu.end(0)
    processes[2].send("account", ordinal=8, **WAITING)
    text = received(processes[2])["text"]
    assert text.startswith("replica 8 waits at train.py:7; replica 0 on host 0 (127.0.0.1) returned\n")


def test_a_host_may_start_its_next_launch_before_host_0_has_ended_this_one(tpu: Slice) -> None:
    tpu.start(0, 1, 2)
    wait_for_connections(tpu)
    tpu.end(1)
    tpu.start(1)
    # It is refused in the meantime.
    time.sleep(3 * TICK_S)
    tpu.end(2)
    tpu.end(0)
    tpu.start(0, 2)
    process = tpu.process(1)
    wait_for_connections(tpu)
    assert tpu.monitors[1].failure is None
    tpu.end(0, HostFailure(0, 7, "host 0 failed"))
    assert received(process)["text"] == "host 0 failed"


FROM_STRANGERS = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1]\n",
    b'{"kind": "host", "host": 9}\n',
    b'{"kind": "account"}\n',
    # They were believed, or ended the monitor's thread.
    b'{"kind": "failed", "host": 1, "code": 0, "text": "give up"}\n',
    b'{"kind": "host", "host": 1}\n{"kind": "finished", "returned": [0, 1]}\n',
    b'{"kind": "account", "ordinal": 0, "in_device": false, "seconds": null}\n',
    b'{"kind": "account", "ordinal": Infinity, "in_device": false}\n',
    b"[" * 100_000 + b"\n",
    b"0" * 64 + b'{"kind": "process"}\n',
    b"x" * 10_000,
)


@pytest.mark.parametrize("port", ["hosts", "processes"])
def test_strangers_change_nothing(tpu: Slice, port: str) -> None:
    tpu.start(0, 1, 2)
    wait_for_connections(tpu)
    process = tpu.process(0)
    own = int(tpu.monitors[0].address.rpartition(":")[2])
    address = NAMES[0], tpu.port if port == "hosts" else own
    with contextlib.ExitStack() as silent:
        # More than the monitor keeps.
        for _ in range(100):
            silent.enter_context(socket.create_connection(address, PATIENCE_S))
        for text in FROM_STRANGERS:
            with socket.create_connection(address, PATIENCE_S) as stranger:
                heard = b""
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(text)
                    while data := stranger.recv(1024):
                        heard += data
                assert len(heard) in (0, 32), "nothing is said to a stranger but the greeting"
        assert is_quiet(process)
        assert tpu.monitors[0].failure is None
        assert connected(tpu, 0)
        # It still does what it is there for.
        tpu.end(1, FAILED)
        assert received(process)["text"] == FAILED.text


def test_a_stranger_in_the_place_of_the_monitor_learns_no_secret_and_is_not_believed() -> None:
    with socket.create_server((NAMES[0], 0)) as server:
        server.settimeout(PATIENCE_S)
        connecting = threading.Thread(
            target=lambda: made.append(SealedConnection.open(address, SECRET, PATIENCE_S))
        )
        made: list[SealedConnection] = []
        address = f"{NAMES[0]}:{server.getsockname()[1]}"
        connecting.start()
        with server.accept()[0] as stranger:
            stranger.sendall(b"0" * 32)
            connecting.join(PATIENCE_S)
            made[0].send("process")
            heard = stranger.recv(4096)
            assert SECRET.encode() not in heard
            # It can only repeat what it was told.
            for text in (b'{"kind": "failed", "host": 1, "code": 0, "text": "x"}\n', heard):
                stranger.sendall(text)
                with pytest.raises(ValueError, match="does not know the job's secret"):
                    made[0].wait()
        made[0].close()


def test_a_host_that_does_not_connect_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    tpu = Slice(start_timeout_s=1)
    tpu.start(0, 1)
    text = ""
    deadline = time.monotonic() + PATIENCE_S
    # Its end may arrive later.
    while not ("host 2" in text and text.endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
        text += capfd.readouterr().err
    tpu.end(1)
    tpu.end(0)
    assert text == (
        f"polyxla: no connection between host 0 (127.0.0.1) and host 2 (127.0.0.3) on port {tpu.port} yet: "
        "they do not learn of each other's failure. All hosts need the same POLYXLA_SECRET\n"
    )


def test_a_port_that_is_taken_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    tpu = Slice()
    with socket.create_server(("", tpu.port)):
        tpu.start(0)
    tpu.end(0)
    text = capfd.readouterr().err
    assert f"cannot listen on port {tpu.port}, where hosts learn of each other's failure" in text
    assert "POLYXLA_MONITOR_PORT sets another, on all hosts" in text


@pytest.mark.parametrize(
    ("error", "code"),
    [(StalledError("x"), 1), (UsageError("x", fix="y."), 2), (SystemExit(9), 9), (KeyboardInterrupt(), 130)],
)
def test_the_exit_code_of_a_host_becomes_that_of_the_others(error: BaseException, code: int) -> None:
    environ = {env.POLYXLA_MONITOR_PORT: str(free_ports(1)[0]), POLYXLA_SECRET: SECRET}

    def fail(host: int) -> None:
        with monitored(NAMES[:2], host, environ):
            if host == 1:
                raise error
            with pytest.raises(type(error)):
                fail(1)
            # What follows from the failure of host 1.
            raise PolyxlaError("a replica lost its connection")

    text = rf"^host 1 \(127.0.0.2\) failed: {type(error).__name__}"
    with pytest.raises(ReplicaLostError, match=text) as caught:
        fail(0)
    assert caught.value.exit_code == code


def test_hosts_are_named_by_their_slice() -> None:
    hosts = Hosts(("a", "", "", "d"), own=3, port=1, slices=2)
    assert [hosts.named(host) for host in (0, 2, 3)] == [
        "host 0 of slice 0 (a)",
        "host 0 of slice 1",
        "host 1 of slice 1 (d)",
    ]


def test_a_port_that_is_no_number_is_refused() -> None:
    entering = monitored(NAMES, 0, {env.POLYXLA_MONITOR_PORT: "x"})
    with pytest.raises(UsageError, match="POLYXLA_MONITOR_PORT=x"):
        entering.__enter__()
