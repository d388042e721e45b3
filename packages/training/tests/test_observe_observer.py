"""What an Observer reports of a run: reads, rates, memory, values that are not finite."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyxla import launch
from polyxla.plugin import Memory
from polyxla_testing import PluginInstaller, fake
from polyxla_training import Trainer
from polyxla_training.observe import Observer, read_run

HERE = Path(__file__).name


def kinds(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def test_reads_of_polyxla_are_not_counted_as_the_users(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any], device_scalar: Callable[[float], Any]
) -> None:
    run = observed_loop(counters, tmp_path)
    for _ in range(10):
        run.step(loss=device_scalar(1.0))
    assert counters.reads == 6
    summary = run.stop()[-1]["summary"]
    assert summary["reads_per_step"] == 0


def test_reads_of_the_user_are_counted(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any], device_scalar: Callable[[float], Any]
) -> None:
    run = observed_loop(counters, tmp_path)
    for _ in range(10):
        counters.reads += 3
        run.step(loss=device_scalar(1.0))
    run.evaluation(5)
    assert run.stop()[-1]["summary"]["reads_per_step"] == 3


def test_rates_and_memory_are_logged(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any]
) -> None:
    counters.memory_found = Memory(100, 1000, 300)
    counters.hits = 2
    run = observed_loop(counters, tmp_path)
    counters.hits += 3
    counters.fell_back["aten::nonzero"] = 4
    for _ in range(6):
        run.step()
    events = run.stop()
    steps = kinds(events, "step")
    assert [step["step"] for step in steps] == [1, 2, 4, 6]
    assert [step["step_s"] for step in steps[:2]] == [None, None], "the first two steps compile"
    assert all(step["records_per_s"] == pytest.approx(2 * 32 / step["step_s"]) for step in steps[2:])
    assert steps[0]["memory"] == {"used_bytes": 100, "limit_bytes": 1000, "peak_bytes": 300}
    summary = events[-1]["summary"]
    assert (summary["peak_bytes"], summary["cache_hits"], summary["steps"]) == (300, 3, 6)
    assert summary["fallbacks"] == {"aten::nonzero": 4}


def test_utilization_comes_from_the_traced_steps(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any]
) -> None:
    counters.chip = "TPU v4"
    run = observed_loop(counters, tmp_path)
    for _ in range(4):
        torch.zeros(8, 16) @ torch.zeros(16, 4)  # There is nothing to train, so there is no backward pass.
        run.step()
    summary = run.stop()[-1]["summary"]
    assert summary["flops_per_step"] == 2 * 8 * 16 * 4
    assert summary["mfu"] == pytest.approx(1024 / summary["step_s"] / 275e12)
    assert summary["chip"] == "TPU v4"


def test_without_counters_throughput_is_still_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], observed_loop: Callable[..., Any]
) -> None:
    run = observed_loop(None, tmp_path)
    for _ in range(4):
        run.step()
    summary = run.stop()[-1]["summary"]
    assert summary["records_per_s"] > 0
    assert summary["mfu"] is None
    assert "MFU" in capsys.readouterr().err


def test_nan_and_infinity_leave_the_log_valid_json(
    counters: Any, tmp_path: Path, observed_loop: Callable[..., Any]
) -> None:
    run = observed_loop(counters, tmp_path)
    for loss in (1.0, 1.0, 1.0, math.nan):
        run.step(loss=loss)
    run.evaluation(5, loss=math.inf)
    events = run.stop()
    assert [(event["name"], event["step"]) for event in kinds(events, "not_finite")] == [
        ("loss", 4),
        ("val_loss", 4),
    ]
    assert kinds(events, "step")[-1]["values"] == {"loss": None}
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_an_observer_is_a_listener_in_a_users_own_loop(
    counters: Any, on_fake: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(replica: Any) -> None:
        replica.counters = lambda: counters
        replica.add_listener(Observer(replica))
        module = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            counters.compiles += 1
            module(torch.zeros(2, 4)).sum().backward()
            replica.step(optimizer)

    launch(train, runtime="fake", devices=1)
    said = capsys.readouterr().err
    line = train.__code__.co_firstlineno + 8
    assert said.count(f"{HERE}:{line})") == 3
    assert "3 steps in" in said


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture
def on_fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin.hide_others(keep=["polyxla-training"])
    install_plugin.fake_runtime()
    monkeypatch.setenv(fake.FAKE_DEVICES, "1")


def test_a_trainer_writes_a_run_log(on_fake: None, tmp_path: Path) -> None:
    options: Any = {"max_epochs": 2, "log_every_n_steps": 2, "log_dir": str(tmp_path), "progress": False}
    Trainer(runtime="fake", devices=1, **options).fit(Small(), [torch.ones(8, 4)] * 5)
    events = read_run(tmp_path)
    assert events[0]["module"] == "Small"
    assert events[0]["settings"]["max_epochs"] == 2
    assert [event["step"] for event in kinds(events, "step")] == [1, 2, 4, 6, 8, 10]
    assert all(set(event["values"]) == {"loss"} for event in kinds(events, "step"))
    assert events[-1]["summary"]["steps"] == 10
    assert list(tmp_path.glob("events.*")), "TensorBoard's file is there as well"


def test_the_last_step_of_a_training_is_in_the_run_log(on_fake: None, tmp_path: Path) -> None:
    options: Any = {"log_dir": str(tmp_path), "progress": False}
    Trainer(runtime="fake", devices=1, **options).fit(Small(), [torch.ones(8, 4)] * 23)
    events = kinds(read_run(tmp_path), "step")
    assert [event["step"] for event in events] == [1, *range(2, 23, 2), 23]
    assert [event["steps"] for event in events][-2:] == [2, 1], "the windows of the throughput"


def documented() -> dict[str, set[str]]:
    """Return the fields of each event that the page lists; what is in parentheses are values."""
    page = (Path(__file__).parents[3] / "docs" / "logging-and-profiling.md").read_text()
    section = page.partition("## The run log")[2]
    rows = re.findall(r"^\| `(\w+)`[^|]*\| (.*) \|$", section, re.MULTILINE)
    return {event: set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", text))) for event, text in rows}


def test_the_log_has_the_fields_that_the_page_lists(
    counters: Any,
    tmp_path: Path,
    observed_loop: Callable[..., Any],
    fallback_op: Callable[[Any], Any],
    on_fake: None,
) -> None:
    run = observed_loop(counters, tmp_path / "loop")
    fallback_op(torch.zeros(1))
    counters.compiles += 1
    run.step()
    run.step(loss=math.nan)
    run.evaluation(5)
    options: Any = {"log_dir": str(tmp_path / "training"), "progress": False}
    Trainer(runtime="fake", devices=1, **options).fit(Small(), [torch.ones(8, 4)])
    found: dict[str, set[str]] = {}
    for event in (*run.stop(), *read_run(tmp_path / "training")):
        found.setdefault(event["event"], set()).update(event.keys() - {"event"})
    assert found == documented()
