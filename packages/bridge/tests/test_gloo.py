"""Naps of gloo's threads: one that gets the same answer again and again does not keep a core busy."""

from __future__ import annotations

import ctypes
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

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


def test_gloo_waits_by_the_function_that_naps(engine: JaxEngine) -> None:
    module = hlo_module_from_text(SUM).as_serialized_hlo_module_proto()
    executable = engine.compile(module, xla_client.CompileOptions().SerializeAsString())
    results = []
    before = native.LOCKED.polyxla_waits()
    for index, device in enumerate(engine.devices):
        data = np.array([index + 1], np.float32).view(np.uint8).data
        argument = engine.from_host(device, ArrayType("float32", ()), data)
        results += engine.execute(executable, device, [argument])
    hosts = [engine.to_host(result).result(TIMEOUT_S) for result in results]
    assert [np.frombuffer(host, np.float32)[0] for host in hosts] == [3, 3]
    assert native.LOCKED.polyxla_waits() > before


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


def send_later(end: socket.socket) -> None:
    time.sleep(0.002)
    end.send(b"x")


def test_a_thread_that_waits_for_each_message_does_not_nap() -> None:
    wait = native.UNLOCKED.polyxla_epoll_wait
    events, before = (Event * 8)(), native.LOCKED.polyxla_naps()
    ours, others = socket.socketpair()
    with ours, others, select.epoll() as epoll, ThreadPoolExecutor(1) as sender:
        epoll.register(ours, select.EPOLLIN)
        for _ in range(16):
            sent = sender.submit(send_later, others)
            assert wait(epoll.fileno(), events, len(events), 1000) == 1
            ours.recv(1)
            sent.result()
    assert native.LOCKED.polyxla_naps() == before


def test_a_wait_without_an_event_ends_with_its_timeout() -> None:
    events = (Event * 8)()
    with select.epoll() as epoll:
        assert native.UNLOCKED.polyxla_epoll_wait(epoll.fileno(), events, len(events), 1) == 0
