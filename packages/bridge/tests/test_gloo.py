"""Naps of gloo's threads: one whose socket has data that nobody asked for yet does not keep a core busy."""

from __future__ import annotations

import ctypes
import select
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge import native
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.programs.executable import ArrayType

TIMEOUT_S = 60
SUM = """HloModule sum, replica_count=2
    add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
    ENTRY main { x = f32[] parameter(0) ROOT r = f32[] all-reduce(x), replica_groups={}, to_apply=add }"""


@pytest.fixture
def engine(free_port: Callable[[], int]) -> Iterator[JaxEngine]:
    engine = JaxEngine(BridgeSettings(2, 1, 0, f"127.0.0.1:{free_port()}"))
    yield engine
    engine.close()


def test_gloo_naps_while_a_replica_is_late(engine: JaxEngine) -> None:
    module = hlo_module_from_text(SUM).as_serialized_hlo_module_proto()
    executable = engine.compile(module, xla_client.CompileOptions().SerializeAsString())

    def start(index: int) -> Callable[[], float]:
        data = np.array([index + 1], np.float32).view(np.uint8).data
        argument = engine.from_host(engine.devices[index], ArrayType("float32", ()), data)
        (result,) = engine.execute(executable, engine.devices[index], [argument])
        host = engine.to_host(result)
        return lambda: float(np.frombuffer(host.result(TIMEOUT_S), np.float32)[0])

    # The first time, gloo also connects the replicas.
    assert [one() for one in [start(0), start(1)]] == [3, 3]
    before = native.LOCKED.polyxla_naps()
    early = start(0)
    time.sleep(0.5)
    late = start(1)
    assert (early(), late()) == (3, 3)
    assert native.LOCKED.polyxla_naps() > before


class Event(ctypes.Structure):
    """Source: struct epoll_event, packed on x86-64, in sys/epoll.h."""

    _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


@pytest.mark.parametrize("is_read", [True, False])
def test_only_a_thread_that_reads_nothing_naps(is_read: bool) -> None:
    wait = native.UNLOCKED.polyxla_epoll_wait
    events, before = (Event * 8)(), native.LOCKED.polyxla_naps()
    ours, others = socket.socketpair()
    with ours, others, select.epoll() as epoll:
        epoll.register(ours, select.EPOLLIN)
        others.send(b"x" * 64)
        for _ in range(64):
            assert wait(epoll.fileno(), events, len(events), 1000) == 1
            assert events[0].data & 0xFFFFFFFF == ours.fileno()
            if is_read:
                ours.recv(1)
                # As long as reading a part of a real message takes.
                time.sleep(0.0001)
        naps = native.LOCKED.polyxla_naps() - before
    assert naps == 0 if is_read else naps > 32


def test_a_wait_without_an_event_ends_with_its_timeout() -> None:
    events = (Event * 8)()
    with select.epoll() as epoll:
        assert native.UNLOCKED.polyxla_epoll_wait(epoll.fileno(), events, len(events), 1) == 0
