"""Fixtures that several test modules share: scripted counters, a loop around an Observer, fake replicas."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from polyxla.plugin import Counters, Counts, Memory, World
from polyxla_training import long_work
from polyxla_training.observe import Observer, RunLog, read_run

if TYPE_CHECKING:
    from polyxla_testing import PluginInstaller

# pytest rewrites the assertions in it, unless it is imported here before.
pytest_plugins = ["polyxla_testing.fixtures"]
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def fake_replicas(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four fake devices, a plugin that gives every replica its share of the batches, an empty directory."""
    install_plugin.hide_others(keep=["polyxla-training"])
    install_plugin.fake_runtime()
    install_plugin.listener("every-nth", (PROGRAMS / "every_nth.py").read_text())
    monkeypatch.setenv("FAKE_DEVICES", "4")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


class ScriptedCounters(Counters):
    """Counts that a test sets."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.compiles = self.executions = self.reads = self.hits = 0
        self.fell_back: dict[str, int] = {}
        self.memory_found: Memory | None = None
        self.seconds_each = 0.5
        self.chip = None

    def counts(self) -> Counts:
        return Counts(self.compiles, self.executions, self.reads, self.hits)

    def compile_s(self) -> float:
        return self.seconds_each * self.compiles

    def fallbacks(self) -> dict[str, int]:
        return dict(self.fell_back)

    def memory(self) -> Memory | None:
        return self.memory_found


# All tests share it: torch registers the operation below once, and that operation counts in it.
COUNTERS = ScriptedCounters()


@pytest.fixture
def counters() -> Iterator[ScriptedCounters]:
    """Counters that count nothing but what the test, or `fallback_op`, adds."""
    from torch.overrides import _get_current_function_mode_stack

    COUNTERS.reset()
    yield COUNTERS
    assert not _get_current_function_mode_stack(), "a tracer was left behind"


@pytest.fixture
def fallback_op(counters: ScriptedCounters) -> Callable[[Any], Any]:
    """The operation ``polyxla_test::slow``, which the host runs, as the counters show."""
    return _fallback_op()


@functools.cache
def _fallback_op() -> Callable[[Any], Any]:
    import torch

    def slow(value: torch.Tensor) -> torch.Tensor:
        COUNTERS.reads += 1
        COUNTERS.fell_back["polyxla_test::slow"] = COUNTERS.fell_back.get("polyxla_test::slow", 0) + 1
        return value + 1

    schema = "(Tensor value) -> Tensor"
    return torch.library.custom_op("polyxla_test::slow", slow, mutates_args=(), schema=schema)


class DeviceScalar:
    """A value that waits for the device whenever it is read."""

    def __init__(self, counters: ScriptedCounters, value: float) -> None:
        self._counters, self._value = counters, value

    def __float__(self) -> float:
        self._counters.reads += 1
        return self._value


@pytest.fixture
def device_scalar(counters: ScriptedCounters) -> Callable[[float], DeviceScalar]:
    return functools.partial(DeviceScalar, counters)


class ObservedLoop:
    """A user's loop around an Observer."""

    replica: Any

    def __init__(
        self, counters: Counters | None, folder: Path | None = None, *, shared: bool = False, **options: Any
    ) -> None:
        self.replica = SimpleNamespace(
            counters=lambda: counters, world_size=2, runtime="test", kind="TEST", current_loader=None, steps=0
        )
        self.replica.world = World(2, 0, 0, 2, process_count=1 if shared else 2)
        self.replica.data_world = self.replica.world
        self.training = SimpleNamespace(batch=_batch(32), records=0, waited_s=0.0)
        log = RunLog(folder) if folder else None
        if log:
            log.start(self.replica, settings={})
        self.folder = folder
        self.observer = Observer(self.replica, log=log, **{"every_n_steps": 2, **options})

    def step(self, loss: Any = 1.0, records: int = 32) -> None:
        self.replica.steps += 1
        self.replica.current_loader = self.training
        self.training.batch = _batch(records)
        self.training.records += records
        self.observer.polyxla_step_finished(step=self.replica.steps, logged={"loss": loss})

    def evaluation(self, records: int, loss: float = 1.0) -> None:
        self.replica.current_loader = SimpleNamespace(batch=_batch(records), records=records, waited_s=0.0)
        self.observer.polyxla_metrics_ready(step=self.replica.steps, metrics={"val_loss": loss})

    def stop(self, error: BaseException | None = None) -> list[dict[str, Any]]:
        """End the run; return the events in its log."""
        self.observer.polyxla_replica_stopped(error=error)
        return read_run(self.folder) if self.folder else []


def _batch(records: int) -> dict[str, Any]:
    import torch

    return {"x": torch.zeros(records, 4), "y": torch.zeros(records, dtype=torch.int64)}


@pytest.fixture
def observed_loop() -> Callable[..., ObservedLoop]:
    return ObservedLoop


SERVER_S = 60.0
"""Longest start of the server, which imports much."""


class S3Server:
    """A local server that speaks S3's protocol, with one bucket."""

    def __init__(self, url: str) -> None:
        self._url = url

    def fail(self, method: str, status: int, count: int = 10**6, after: int = 0) -> None:
        """Answer requests of this method with this status, and not at all if it is 0."""
        faults = {"method": method, "status": status, "count": count, "after": after}
        request = urllib.request.Request(f"{self._url}/-/faults", json.dumps(faults).encode(), method="POST")
        urllib.request.urlopen(request, timeout=SERVER_S).close()


@pytest.fixture(scope="session")
def s3_process() -> Iterator[str]:
    """Start the server; yield its URL."""
    pytest.importorskip("s3fs")
    command = [sys.executable, str(PROGRAMS / "s3_server.py")]
    pipe = subprocess.PIPE
    # It writes a line for each request to standard error.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        guard = threading.Timer(SERVER_S, process.kill)
        guard.start()
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        guard.cancel()
        assert url
        yield url
        process.kill()


@pytest.fixture
def s3(s3_process: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Point the environment at the server, which has an empty bucket ``bucket``."""
    import fsspec

    given = {"ENDPOINT_URL": s3_process, "ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test"}
    for name, value in {**given, "DEFAULT_REGION": "us-east-1", "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    fsspec.filesystem("s3").mkdir("bucket")
    server = S3Server(s3_process)
    yield server
    server.fail("", 0)
    fsspec.filesystem("s3").rm("bucket", recursive=True)


@pytest.fixture(params=["memory", "s3"])
def remote(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty directory, in fsspec's memory and on a server."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        yield "s3://bucket/run"
        return
    import fsspec

    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()


MEETINGS_S = 20.0
"""Longest wait for replicas that should meet, in seconds; less than their own for each other."""


class Meetings:
    """Counts how often ordinal 0 of the fake runtime has met the other replicas."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def add(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Wait for this number of further meetings, as slow storage keeps its reader."""
        with self._changed:
            last = self._count + count
            if not self._changed.wait_for(lambda: self._count >= last, MEETINGS_S):
                raise TimeoutError("the other replicas wait in one collective")


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> Meetings:
    from polyxla_testing import fake

    found = Meetings()
    exchange = fake._Meeting.exchange

    def counted(self: Any, ordinal: int, *arguments: Any) -> Any:
        result = exchange(self, ordinal, *arguments)
        if ordinal == 0:
            found.add()
        return result

    monkeypatch.setattr(fake._Meeting, "exchange", counted)
    monkeypatch.setattr(long_work, "LONGEST_WAIT_S", 0.05)
    return found


NOBODY = 65534


@pytest.fixture
def unprivileged() -> AbstractContextManager[None]:
    """Within the block, act as a user without permissions, if this process runs as root."""
    return _unprivileged()


@contextmanager
def _unprivileged() -> Iterator[None]:
    before = os.geteuid()
    os.seteuid(NOBODY if before == 0 else before)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    """Wait until a condition holds, with a deadline."""

    def wait(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SERVER_S
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    return wait
