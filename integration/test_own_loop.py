"""Users' own loops on torch_xla: what the default watch reports, and that it adds nothing to a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from polyxla import Replica
from polyxla_testing import RuntimeUnderTest
from polyxla_training import Trainer

HERE = Path(__file__).name


def batches(*records: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, 8, generator=generator) for count in records]


def line(function: Callable[..., Any], offset: int) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


def own_lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Return what polyxla printed, without the choice of the runtime and a TPU's padding of batches."""
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("polyxla: ")]
    said = [line for line in said if "which a TPU pads to a multiple of" not in line]
    return [line for line in said if "runtime " not in line.partition(":")[2][:10]]


def with_habits(replica: Replica, habit: str, width: int) -> None:
    module = replica.setup(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    sizes = {"shapes": [4, 4, 5, 6, 7, 8, 9, 10], "shape": [4, 4, 4, 4, 3]}.get(habit, [4] * 8)
    for batch in replica.loader(batches(*sizes)):
        optimizer.zero_grad()
        loss = module(batch).square().mean()
        if habit == "item":
            loss.item()
        if habit == "print":
            print(loss)
        if habit == "fallback":
            torch.histc(batch, 4)
        if habit == "nan":
            loss = loss * math.nan
        loss.backward()
        replica.step(optimizer, {"loss": loss})


@pytest.mark.torch_xla("torch_xla's loader")
def test_a_program_that_leaves_its_loop_early_ends_well(runtime: RuntimeUnderTest) -> None:
    done = runtime.run("--devices", "1", str(Path(__file__).parent / "programs" / "leave_loop.py"))
    # torch_xla's own threads would abort the process: exit code -6.
    assert (done.returncode, done.stdout) == (0, f"{1 << 22}\n"), done.stderr


@pytest.mark.slow
@pytest.mark.torch_xla("steps that wait for a sync")
def test_a_loop_that_never_syncs_is_reported_while_it_runs(runtime: RuntimeUnderTest) -> None:
    program = Path(__file__).parent / "programs" / "steps_without_sync.py"
    done = runtime.run("--devices", "1", str(program))
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "without torch_xla.sync()" in line]
    assert f"{program.name}:19 makes optimizer steps, and none has run for 5 s" in said


@pytest.mark.torch_xla("collectives that wait for a sync")
@pytest.mark.parametrize(("arguments", "lines"), [([], 2), (["sync"], 0)])
def test_a_loop_that_reads_collectives_and_never_syncs_is_reported(
    runtime: RuntimeUnderTest, arguments: list[str], lines: int
) -> None:
    program = Path(__file__).parent / "programs" / "reads_of_collectives.py"
    done = runtime.run("--devices", "2", str(program), *arguments)
    assert done.stdout == "[90.0, 90.0]\n", done.stderr
    said = [line for line in done.stderr.splitlines() if "reads collectives" in line]
    assert len(said) == lines
    assert all(f"{program.name}:14" in line and "Call torch_xla.sync() after" in line for line in said)


@pytest.mark.torch_xla("counters of reads and of one program for each step")
@pytest.mark.parametrize(
    ("habit", "expected"),
    [
        ("none", []),
        ("item", [f"{line(with_habits, 8)}: the host reads the device (torch.Tensor.item) 1 time a step"]),
        (
            "print",
            [f"{line(with_habits, 10)}: the host copies a tensor from the device (print) 1 time a step"],
        ),
        ("fallback", [f"{line(with_habits, 12)}: aten::histc runs on the host, 1 time a step"]),
        ("nan", ["loss is nan at step 8"]),
        ("shape", ["step 5 compiled a program in"]),
        (
            "shapes",
            [*(f"step {step} compiled a program in" for step in (3, 4, 5)), "3 steps have compiled late"],
        ),
    ],
)
def test_a_loop_is_watched_by_default(
    runtime: RuntimeUnderTest, capfd: pytest.CaptureFixture[str], habit: str, expected: list[str]
) -> None:
    # A width of its own: the programs of another case are not compiled again.
    runtime.launch(with_habits, habit, 20 + len(habit) + 16 * len(expected), devices=1)
    said = own_lines(capfd)
    assert len(said) == len(expected), said
    for sentence, text in zip(said, expected, strict=True):
        assert text in sentence
    if habit == "shape":
        assert "batch [4, 8] float32 -> [3, 8] float32" in said[0]
        assert line(with_habits, 16) in said[0]


def plain(replica: Replica, width: int, decay: float) -> None:
    """A loop without `Replica.step`."""
    import torch_xla

    module = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 1)).to(replica.device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=decay)
    batch = torch.ones(4, 8, device=replica.device)
    for step in range(8):
        if step == 5:
            optimizer.param_groups[0]["lr"] = 1e-9
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()
        torch_xla.sync()


@pytest.mark.torch_xla("constants in the step's program")
def test_a_factor_that_became_a_constant_is_named(
    runtime: RuntimeUnderTest, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime.launch(plain, 21, 0.01, devices=1)
    [said] = own_lines(capfd)
    assert "step 6 compiled a program in" in said
    assert "AdamW's factor 1 - lr * weight_decay is now 1 in float32" in said
    assert line(plain, 12) in said


def counted(replica: Replica, width: int) -> dict[str, int]:
    import torch_xla.debug.metrics as met

    def totals() -> dict[str, int]:
        names = ("CompileTime", "ExecuteTime", "TransferToDeviceTime", "TransferFromDeviceTime")
        found = {name: met.metric_data(name) for name in names}
        return {name: data[0] if data else 0 for name, data in found.items()}

    before = totals()
    with_habits(replica, "none", width)
    replica.sync(wait=True)
    return {name: total - before[name] for name, total in totals().items()}


@pytest.mark.torch_xla("torch_xla's metrics")
def test_watching_adds_no_execution_no_transfer_and_no_program(
    runtime: RuntimeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch_xla keeps the numbers that it has uploaded, such as the learning rate.
    runtime.launch(counted, 99, devices=1)
    [watched] = runtime.launch(counted, 101, devices=1)
    monkeypatch.setenv("POLYXLA_OBSERVE", "off")
    [unwatched] = runtime.launch(counted, 103, devices=1)
    assert watched == unwatched
    assert watched["CompileTime"] > 0


def decaying(replica: Replica, width: int) -> list[int]:
    """Return how many programs each step of AdamW compiled; its factors become 1 in float32."""
    counters = replica.counters()
    assert counters is not None
    module = replica.setup(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 1)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.1))
    compiled = []
    for step in range(14):
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.1**step
        before = counters.counts()
        optimizer.zero_grad()
        module(torch.ones(4, 8, device=replica.device)).square().mean().backward()
        replica.step(optimizer)
        compiled.append(counters.counts().since(before).compiles)
    return compiled


@pytest.mark.torch_xla("constants in the step's program")
def test_an_optimizers_factors_stay_inputs_when_they_become_1(runtime: RuntimeUnderTest) -> None:
    [compiled] = runtime.launch(decaying, 105, devices=1)
    assert compiled[:2] != [0, 0]
    assert compiled[2:] == [0] * 12


def alone(replica: Replica) -> float:
    """Two mistakes: nobody divides the records, or averages the gradients."""
    dataset = TensorDataset(torch.arange(32.0).view(16, 2))
    module = nn.Linear(2, 1)
    nn.init.ones_(module.weight)
    nn.init.zeros_(module.bias)
    replica.setup(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    order = torch.Generator().manual_seed(replica.ordinal)
    for (batch,) in DataLoader(dataset, 4, shuffle=True, generator=order):
        optimizer.zero_grad()
        module(batch.to(replica.device)).square().mean().backward()
        optimizer.step()
        replica.sync()
    return float(module.bias)


@pytest.mark.torch_xla("replicas that are threads")
@pytest.mark.parametrize("processes", [2, 1])
def test_what_replicas_do_silently_wrong_is_reported(
    runtime: RuntimeUnderTest,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    require_layout: Callable[[int, int], None],
    processes: int,
) -> None:
    require_layout(2, processes)
    monkeypatch.setenv("POLYXLA_PJRT_PROCESSES", str(processes))
    runtime.launch(alone, devices=2)
    said = own_lines(capfd)
    assert len(said) == 2, said
    assert f"{line(alone, 12)}: replicas trained different parameters: " in said[0]
    assert "each of 2 replicas trained on all 16 records of TensorDataset" in said[1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 17)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.torch_xla("one program for each step")
@pytest.mark.parametrize("steps_per_epoch", [1, 2, 3])
def test_a_short_epoch_compiles_nothing_late(
    runtime: RuntimeUnderTest, capfd: pytest.CaptureFixture[str], steps_per_epoch: int
) -> None:
    options: dict[str, Any] = {"max_epochs": 4, "log_dir": None, "progress": True}
    trainer = Trainer(devices=1, runtime=runtime.name, **options)
    trainer.fit(Net(), batches(*[30 + steps_per_epoch] * steps_per_epoch))
    said = [line for line in own_lines(capfd) if "compiled" in line]
    assert [line for line in said if "as expected" not in line and " steps in " not in line] == []
