"""Fixtures that several test modules share: scripted counters, a loop around an Observer, fake replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from polyxla import World
from polyxla.contracts.counters import Counters, Counts, Memory
from polyxla_training.observe import Observer, RunLog, read_run

if TYPE_CHECKING:
    from polyxla.testing import PluginInstaller

# pytest rewrites the assertions in it, unless it is imported here before.
pytest_plugins = ["polyxla.testing.fixtures"]
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
        self.chip = None

    def counts(self) -> Counts:
        return Counts(self.compiles, self.executions, self.reads, self.hits)

    def compile_s(self) -> float:
        return 0.5 * self.compiles

    def fallbacks(self) -> dict[str, int]:
        return dict(self.fell_back)

    def memory(self) -> Memory | None:
        return self.memory_found


# One for all tests, because the operation below, which torch registers once, counts in it.
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
