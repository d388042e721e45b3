"""`RemoteEngine` keeps the contract of an engine, however slowly and in whatever pieces its bytes travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from polyxla.plugin import snapshot
from polyxla_testing.engine_conformance import EngineConformance, OpenEngine
from polyxla_testing.wire import Direction, Fault, How, WireProxy
from polyxla_xrt import env
from polyxla_xrt.client.engine import RemoteEngine
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.config.resuming import read_resuming

TIMEOUT_S = 60.0
ATTACHED = 3
"""Number of the first message to a client that belongs to its session: status, lease, attachment."""
DELAY_S = 0.003
"""How long the proxy holds up every message, in seconds."""
PIECES = (1, 3, 8, 1021, 9, 17, 16_381)
"""Sizes of the proxy's pieces, in bytes: they end within headers of frames and of messages."""


@pytest.fixture(scope="module")
def workers(share_worker: Callable[..., Any]) -> Callable[[int], Any]:
    """Return a function that returns a worker with a number of cores."""
    started: dict[int, Any] = {}

    def worker(cores: int) -> Any:
        if cores not in started:
            started[cores] = share_worker("--devices", str(cores))
        return started[cores]

    return worker


@pytest.fixture(scope="module")
def proxies(workers: Callable[[int], Any]) -> Iterator[Callable[[int], WireProxy]]:
    """Return a function that returns a proxy before the worker with a number of cores."""
    with ExitStack() as stack:
        started: dict[int, WireProxy] = {}

        def proxy(cores: int) -> WireProxy:
            if cores not in started:
                started[cores] = WireProxy(workers(cores).address, DELAY_S, PIECES)
                stack.callback(started[cores].close)
            return started[cores]

        yield proxy


@contextmanager
def opening(
    workers: Callable[[int], Any], address_of: Callable[[int], str], **variables: str
) -> Iterator[OpenEngine]:
    environ = snapshot() | variables
    with ExitStack() as stack:

        def open_engine(count: int) -> RemoteEngine:
            address, resuming = address_of(count), read_resuming(environ)
            stack.callback(workers(count).wait_until_free)
            lease = Lease(address, count, environ, wait_s=TIMEOUT_S, resuming=resuming)
            stack.enter_context(closing(lease))
            assignment = Assignment(address, lease.job, tuple(range(count)), "TPU", 0, count, 0, 1)
            return stack.enter_context(closing(RemoteEngine(assignment, environ)))

        yield open_engine


class TestConformance(EngineConformance):
    """Every engine passes these tests."""

    @pytest.fixture
    def open_engine(self, workers: Callable[[int], Any]) -> Iterator[OpenEngine]:
        with opening(workers, lambda count: workers(count).address) as open_engine:
            yield open_engine


class TestConformanceThroughAProxy(EngineConformance):
    """Every engine passes these tests."""

    @pytest.fixture
    def open_engine(
        self, workers: Callable[[int], Any], proxies: Callable[[int], WireProxy]
    ) -> Iterator[OpenEngine]:
        with opening(workers, lambda count: proxies(count).address) as open_engine:
            yield open_engine


@pytest.mark.long
@pytest.mark.parametrize("at", range(ATTACHED, ATTACHED + 4))
class TestConformanceThroughLosses(EngineConformance):
    """Every engine passes these tests; this one loses its worker amid them, and goes on."""

    @pytest.fixture
    def open_engine(
        self, workers: Callable[[int], Any], proxies: Callable[[int], WireProxy], at: int
    ) -> Iterator[OpenEngine]:
        def address_of(count: int) -> str:
            proxies(count).begin(Fault(Direction.TO_CLIENT, at, How.CUT, times=3))
            return proxies(count).address

        given = {env.POLYXLA_XRT_RESUME: f"{TIMEOUT_S}", env.POLYXLA_XRT_SNAPSHOT_EVERY: "2"}
        with opening(workers, address_of, **given) as open_engine:
            yield open_engine
