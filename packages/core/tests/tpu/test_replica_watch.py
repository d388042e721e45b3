"""Watching replicas through a probe of their devices; no device, and no runtime."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from polyxla.presence import Position
from polyxla.tpu.monitor.connection import SealedConnection
from polyxla.tpu.monitor.replica_watch import ProcessWatch

PATIENCE_S = 30.0
SECRET = "of one job"


class Probe:
    """A device that works until the test says otherwise, and ends no program."""

    def __init__(self) -> None:
        self.has_finished = threading.Event()

    def ended(self) -> int:
        return 0

    def wait(self) -> None:
        self.has_finished.wait(PATIENCE_S)


@pytest.fixture
def ends() -> Iterator[tuple[SealedConnection, SealedConnection]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(SealedConnection.open, address, SECRET, PATIENCE_S)
            monitor = SealedConnection.accept(server, SECRET)
            process = opening.result(PATIENCE_S)
    yield process, monitor
    process.close()
    monitor.close()


def account(monitor: SealedConnection, *, in_device: bool) -> dict[str, Any]:
    """Return the next account that says this of the device."""
    while select.select([monitor], [], [], PATIENCE_S)[0]:
        for message in monitor.receive():
            if message["in_device"] == in_device:
                return message
    raise AssertionError("no such account arrived")


def test_a_probe_says_whether_a_replica_is_in_its_device(
    ends: tuple[SealedConnection, SealedConnection],
) -> None:
    process, monitor = ends
    probe = Probe()
    made_in: list[int] = []

    def make() -> Probe:
        made_in.append(threading.get_ident())
        return probe

    watch = ProcessWatch(process, 0.4, make)
    watch.follow(Position(3))
    assert made_in == [threading.get_ident()], "a probe finds the device of the replica's thread"
    assert account(monitor, in_device=True)["ordinal"] == 3
    probe.has_finished.set()
    assert not account(monitor, in_device=False)["has_returned"]
    watch.follow(Position(3, has_returned=True))
    while not account(monitor, in_device=False)["has_returned"]:
        pass
