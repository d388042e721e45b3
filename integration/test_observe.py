"""Observing a training on the real torch_xla: compilations, host reads, fallbacks, the report of a run."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyxla import Replica
from polyxla_testing import RuntimeUnderTest
from polyxla_training import Trainer
from polyxla_training.observe import CompileBudgetError, Observer, read_run
from polyxla_training.observe.report.page import render
from polyxla_training.observe.report.run import LoggedRun

HERE = Path(__file__).name


class Net(nn.Module):
    """A module whose training_step has a bad `habit`."""

    def __init__(self, habit: str = "none") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.habit = habit
        self.total = 0.0

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(batch["x"]) - batch["y"]).square().mean()
        if self.habit == "item":
            self.total += loss.item()
        if self.habit == "float":
            self.total += float(loss.detach())
        if self.habit == "if" and loss.detach():
            self.total += 1
        if self.habit == "cpu":
            loss.detach().cpu()
        if self.habit == "tolist":
            self.total += loss.reshape(1).tolist()[0]
        if self.habit == "print":
            print(loss)
        if self.habit == "fallback":
            self.total += len(torch.histc(batch["x"].detach(), 4))
        if self.habit == "nan":
            loss = loss * torch.full((), math.nan, device=loss.device)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.log("val_loss", (self.layers(batch["x"]) - batch["y"]).square().mean())  # type: ignore[operator]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def line_of(code: str) -> str:
    lines, first = inspect.getsourcelines(Net.training_step)
    [offset] = [number for number, line in enumerate(lines) if code in line]
    return f"{HERE}:{first + offset}"


def batches(*records: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(count, 8, generator=generator), "y": torch.ones(count, 1)} for count in records]


def fit(
    runtime: RuntimeUnderTest, directory: Path, module: Net, data: list[Any], val: Any = None, **options: Any
) -> list[dict[str, Any]]:
    options = {"max_epochs": 2, "log_every_n_steps": 2, "progress": False, **options}
    trainer = Trainer(devices=1, runtime=runtime.name, log_dir=str(directory), **options)
    trainer.fit(module, data, val)
    return read_run(directory)


def kinds(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


@pytest.mark.torch_xla("one program for each step")
def test_a_compilation_names_the_batch_whose_shape_changed(
    runtime: RuntimeUnderTest, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    events = fit(runtime, tmp_path, Net(), batches(12, 12, 12, 12, 5), batches(10), progress=True)
    unexpected = [event for event in kinds(events, "compile") if not event["expected"]]
    assert [event["step"] for event in unexpected] == [5]
    assert "batch['x'] [12, 8] float32 -> [5, 8] float32" in unexpected[0]["cause"]
    assert "batch['y'] [12, 1] float32 -> [5, 1] float32" in unexpected[0]["cause"]
    assert HERE in unexpected[0]["line"]
    assert unexpected[0]["seconds"] > 0
    summary = events[-1]["summary"]
    assert summary["unexpected"] == 1
    assert summary["reads_per_step"] == 0, "polyxla's own reads are not counted"
    # A device that is called a TPU also reports that twelve rows are padded to sixteen.
    assert not [finding for finding in events[-1]["findings"] if finding["kind"] != "padding"]
    assert summary["records_per_s"] > 0
    stderr = capfd.readouterr().err
    assert "step 5 compiled a program" in stderr
    assert "10 steps in" in stderr


@pytest.mark.parametrize(
    ("habit", "code", "kind", "op"),
    [
        ("item", "loss.item()", "read", "torch.Tensor.item"),
        ("float", "float(loss", "read", "torch.Tensor.__float__"),
        ("if", "and loss.detach()", "read", "torch.Tensor.__bool__"),
        ("cpu", ".cpu()", "copy", "torch.Tensor.cpu"),
        ("tolist", ".tolist()", "copy", "torch.Tensor.tolist"),
        ("print", "print(loss)", "copy", "print"),
    ],
)
def test_a_host_read_inside_a_step_is_found_with_its_line(
    runtime: RuntimeUnderTest, tmp_path: Path, habit: str, code: str, kind: str, op: str
) -> None:
    # A size of its own: the programs of another case are not compiled again.
    size = 20 + ["item", "float", "if", "cpu", "tolist", "print"].index(habit)
    events = fit(runtime, tmp_path, Net(habit), batches(*[size] * 4))
    [finding] = kinds(events, "finding")
    is_eager = runtime.name == "torchtpu"
    if is_eager and habit == "print":
        # Element by element, some of them several times.
        assert (finding["kind"], finding["op"]) == ("read", op)
        assert finding["count"] > 1
    else:
        assert (finding["kind"], finding["op"], finding["count"]) == (kind, op, 1)
    assert finding["line"].endswith(line_of(code))
    assert events[-1]["summary"]["reads_per_step"] == pytest.approx(finding["count"])
    assert is_eager or line_of(code) in kinds(events, "compile")[0]["cause"] or habit == "print"


@pytest.mark.torch_xla("fallbacks to the host")
def test_an_operation_that_falls_back_to_the_host_is_found(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    events = fit(runtime, tmp_path, Net("fallback"), batches(9, 9, 9))
    # A TPU would pad the nine rows, too.
    [finding] = [each for each in kinds(events, "finding") if each["kind"] != "padding"]
    assert (finding["kind"], finding["op"], finding["count"]) == ("fallback", "aten::histc", 1)
    assert finding["line"].endswith(line_of("torch.histc"))
    assert events[-1]["summary"]["fallbacks"] == {"aten::histc": 6}


def test_a_loss_that_is_nan_is_reported_once(
    runtime: RuntimeUnderTest, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    events = fit(runtime, tmp_path, Net("nan"), batches(13, 13, 13))
    assert [(event["name"], event["step"]) for event in kinds(events, "not_finite")] == [("loss", 1)]
    assert capfd.readouterr().err.count("loss is nan at step 1") == 1


@pytest.mark.torch_xla("one program for each step")
def test_exceeding_the_compile_budget_ends_a_training(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    with pytest.raises(CompileBudgetError, match=r"batch\['x'\] \[14, 8\] float32 -> \[3, 8\]"):
        fit(runtime, tmp_path, Net(), batches(14, 14, 14, 3), compile_budget=0, on_budget="raise")
    assert "CompileBudgetError" in read_run(tmp_path)[-1]["error"]


def test_the_report_of_a_run_has_all_plots(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    events = fit(runtime, tmp_path, Net("item"), batches(*[15] * 6, 4), batches(10, 10))
    page = render(LoggedRun.of(str(tmp_path), events))
    for name in ("loss", "Learning rate", "Step time", "Throughput", "Waiting for input", "Compilations"):
        assert f'<figcaption>{name}</figcaption><div class="plot">' in page
    assert line_of("loss.item()") in page


def _counted(replica: Replica) -> dict[str, Any]:
    counters = replica.counters()
    assert counters is not None
    module = nn.Linear(7, 3).to(replica.device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    replica.add_listener(observer := Observer(replica))
    before, compile_s = counters.counts(), counters.compile_s()
    for _ in range(6):
        module(torch.ones(2, 7, device=replica.device)).sum().backward()
        replica.step(optimizer)
        optimizer.zero_grad()
    after = counters.counts().since(before)
    return {
        "counts": after,
        "compile_s": counters.compile_s() - compile_s,
        "flops": observer.summary().flops_per_step,
        "chip": counters.chip,
    }


@pytest.mark.torch_xla("one program for each step")
def test_the_counters_match_the_steps(runtime: RuntimeUnderTest) -> None:
    [result] = runtime.launch(_counted, devices=1)
    assert result["counts"].executions == 6
    assert 1 <= result["counts"].compiles <= 2, "tracing the first steps adds no other program"
    assert result["counts"].host_reads == 0
    assert result["compile_s"] > 0
    # Forward [2, 7] @ [7, 3]; the backward pass takes twice as many.
    assert result["flops"] == 3 * (2 * 2 * 7 * 3)
    assert result["chip"] is None, "not a TPU, whatever the device is called"


class Gathering(Net):
    """Exchanges values and objects in every step; ordinal 0 traces the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.replica: Any = None

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ordinal, size = self.replica.ordinal, self.replica.world_size
        gathered = self.replica.all_gather({"ordinal": ordinal})
        assert gathered == [{"ordinal": ordinal} for ordinal in range(size)]
        numbers = torch.arange(4.0, device=self.replica.device) + ordinal
        low, high = self.replica.all_reduce(numbers, "sum").split(2)
        others = size * (size - 1) / 2
        assert low.tolist() == [others, size + others]
        assert high.tolist() == [2 * size + others, 3 * size + others]
        return super().training_step(batch)


def _gather(replica: Replica) -> list[Any]:
    module = Gathering()
    module.replica = replica
    optimizer = module.configure_optimizers()
    replica.setup(module, optimizer)
    if replica.is_first:
        replica.add_listener(observer := Observer(replica))
    for batch in batches(*[4] * 4):
        on_device = {name: value.to(replica.device) for name, value in batch.items()}
        module.training_step(on_device).backward()
        replica.step(optimizer)
    bias = module.get_parameter("layers.0.bias")
    return [observer.summary().reads_per_step if replica.is_first else None, bias.tolist()]


@pytest.mark.pjrt
@pytest.mark.long
def test_collectives_are_right_while_steps_are_traced(runtime: RuntimeUnderTest) -> None:
    results = runtime.launch(_gather, devices=2)
    assert results[0][0] > 0, "a tracer counts tolist() as a copy"
    assert results[1] == [None, results[0][1]], "both have the same weights"


def _chip(replica: Replica) -> Any:
    return getattr(replica.counters(), "chip", "no counters")


@pytest.mark.pjrt
def test_an_emulated_tpu_is_not_a_known_chip(
    runtime: RuntimeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYXLA_EMULATE", "v3-8")
    assert runtime.launch(_chip, devices=2) == [None, None]
