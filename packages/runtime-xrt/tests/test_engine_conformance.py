"""`RemoteEngine` keeps the contract of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from polyxla.plugin import snapshot
from polyxla_testing.engine_conformance import EngineConformance, OpenEngine
from polyxla_xrt.client.engine import RemoteEngine
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.config.assignment import Assignment

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def workers(share_worker: Callable[..., Any]) -> Callable[[int], Any]:
    """Return a function that returns a worker with a number of cores."""
    started: dict[int, Any] = {}

    def worker(cores: int) -> Any:
        if cores not in started:
            started[cores] = share_worker("--devices", str(cores))
        return started[cores]

    return worker


@pytest.fixture
def open_engine(workers: Callable[[int], Any]) -> Iterator[OpenEngine]:
    with ExitStack() as stack:

        def open_engine(count: int) -> RemoteEngine:
            worker = workers(count)
            stack.callback(worker.wait_until_free)
            lease = stack.enter_context(closing(Lease(worker.address, count, snapshot(), wait_s=TIMEOUT_S)))
            assignment = Assignment(worker.address, lease.job, tuple(range(count)), "TPU", 0, count, 0, 1)
            return stack.enter_context(closing(RemoteEngine(assignment, snapshot())))

        yield open_engine


class TestConformance(EngineConformance):
    """Every engine passes these tests."""
