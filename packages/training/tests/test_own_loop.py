"""Loops that users write themselves are watched by default, and the watch is silent while all is well."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from polyxla import Replica, UsageError, launch
from polyxla_testing import PluginInstaller
from polyxla_training.observe import Observer
from polyxla_training.observe.own_loop import loop_watch
from polyxla_training.observe.own_loop.trained import TrainedParameters

HERE = Path(__file__).name
NEXT = _BaseDataLoaderIter.__next__


@pytest.fixture(autouse=True)
def _fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_plugin.hide_others(keep=["polyxla-training", "polyxla-sampler"])
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "2")
    yield
    assert not _global_optimizer_post_hooks
    assert _BaseDataLoaderIter.__next__ is NEXT


def records(count: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator))


def shared(replica: Replica) -> torch.nn.Linear:
    module = torch.nn.Linear(4, 1)
    torch.nn.init.ones_(module.weight)
    torch.nn.init.zeros_(module.bias)
    return module


def counted(replica: Replica, counters: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a module and its optimizer, in a replica with these counters."""
    replica.counters = lambda: counters  # type: ignore[method-assign]
    module = shared(replica)
    return module, torch.optim.SGD(module.parameters(), lr=0.0)


def said(capsys: pytest.CaptureFixture[str], function: Callable[[Replica], Any], devices: int = 2) -> str:
    """Run the function in every replica; return what polyxla printed, but not how records are divided."""
    launch(function, runtime="fake", devices=devices)
    lines = capsys.readouterr().err.splitlines()
    return "".join(line + "\n" for line in lines if "gets an equal share" not in line)


def line(function: Callable[..., Any], offset: int) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


# Different parameters in the replicas


def alone(replica: Replica, *, module: Any = None, step: Any = None) -> None:
    module = module or shared(replica)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (module(torch.ones(2, 4)) * (replica.ordinal + 1)).sum().backward()
        step(optimizer) if step else optimizer.step()


def test_gradients_that_nobody_averages_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, alone)
    assert text.startswith(
        f"polyxla: packages/training/tests/{line(alone, 6)}: replicas trained different parameters: "
        "parameter 1 of SGD [1] holds -0.6 in replica 0 and -1.2 in replica 1"
    )
    assert "call replica.step(optimizer)" in text
    assert "replica.setup(module, same=False)" in text
    assert text.count("\n") == 1


def test_a_module_that_was_set_up_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "bias [1] holds" in said(
        capsys, lambda replica: alone(replica, module=replica.setup(shared(replica)))
    )


@pytest.mark.parametrize("how", ["replica.step", "its own average", "on purpose", "off"])
def test_parameters_that_agree_or_need_not_are_not_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "off":
        monkeypatch.setenv("POLYXLA_OBSERVE", "off")

    def average(replica: Replica, optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = replica.all_reduce(parameter.grad, "mean")
        optimizer.step()

    def train(replica: Replica) -> None:
        if how == "replica.step":
            alone(replica, step=replica.step)
        elif how == "its own average":
            alone(replica, step=lambda optimizer: average(replica, optimizer))
        else:
            alone(replica, module=replica.setup(shared(replica), same=how == "off"))

    assert said(capsys, train) == ""


def test_differences_of_rounding_are_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def train(replica: Replica) -> None:
        module = shared(replica)
        with torch.no_grad():
            module.weight *= 1 + replica.ordinal * 2e-6
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    assert said(capsys, train) == ""


def test_shards_of_parameters_may_differ(capsys: pytest.CaptureFixture[str]) -> None:
    def train(replica: Replica) -> None:
        module = shared(replica)
        for parameter in module.parameters():
            parameter._is_sharded = True  # type: ignore[attr-defined]
        alone(replica, module=module)

    assert said(capsys, train) == ""


def test_a_nan_in_one_replica_is_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    def train(replica: Replica) -> None:
        module = shared(replica)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        (module(torch.ones(2, 4)).sum() * (math.nan if replica.ordinal else 1.0)).backward()
        optimizer.step()

    assert "and nan in replica 1" in said(capsys, train)


# Records that are not divided


def read(replica: Replica, loader: Any, epochs: int = 2) -> None:
    module = shared(replica)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(epochs):
        for (batch,) in loader:
            optimizer.zero_grad()
            module(batch).sum().backward()
            replica.step(optimizer)


def evaluate(replica: Replica, *, with_gradients: bool) -> None:
    module = shared(replica)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    every = DataLoader(records(6), 2)
    for (batch,) in replica.loader(DataLoader(records(32), 2)):
        with torch.set_grad_enabled(with_gradients):
            for (each,) in every:
                module(each)
        module(batch).sum().backward()
        replica.step(optimizer)


@pytest.mark.parametrize("shuffle", [True, False])
def test_records_that_nobody_divided_are_reported(capsys: pytest.CaptureFixture[str], shuffle: bool) -> None:
    text = said(capsys, lambda replica: read(replica, DataLoader(records(), 2, shuffle=shuffle)))
    assert text == (
        f"polyxla: packages/training/tests/{line(read, 7)}: each of 2 replicas trained on all 8 records of "
        "TensorDataset: they are not divided. Write: for batch in replica.loader(loader)\n"
    )


def test_a_new_loader_for_each_epoch_is_no_other_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    def train(replica: Replica) -> None:
        module = shared(replica)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            for (batch,) in DataLoader(records(), 4):
                module(batch).sum().backward()
                replica.step(optimizer)

    assert "all 8 records" in said(capsys, train)


@pytest.mark.parametrize("how", ["replica.loader", "DistributedSampler", "Subset", "part of a tensor"])
def test_records_that_were_divided_are_not_reported(capsys: pytest.CaptureFixture[str], how: str) -> None:
    def train(replica: Replica) -> None:
        whole, mine = records(), range(replica.ordinal, 8, 2)
        sampler: Any = DistributedSampler(whole, replica.world_size, replica.ordinal)
        loaders: dict[str, Callable[[], Any]] = {
            "replica.loader": lambda: replica.loader(DataLoader(whole, 2)),
            "DistributedSampler": lambda: DataLoader(whole, 2, sampler=sampler),
            "Subset": lambda: DataLoader(Subset(whole, mine), 2),
            "part of a tensor": lambda: DataLoader(TensorDataset(whole.tensors[0][list(mine)]), 2),
        }
        read(replica, loaders[how]())

    assert said(capsys, train) == ""


@pytest.mark.parametrize("with_gradients", [True, False])
def test_evaluating_all_records_in_every_replica_is_not_reported(
    capsys: pytest.CaptureFixture[str], with_gradients: bool
) -> None:
    assert said(capsys, lambda replica: evaluate(replica, with_gradients=with_gradients)) == ""


# Reports of ordinal 0 on its steps


def logging(replica: Replica, losses: list[Any], counters: Any = None) -> None:
    if counters is not None:
        replica.counters = lambda: counters  # type: ignore[method-assign]
    module = shared(replica)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for loss in losses:
        module(torch.ones(2, 4)).sum().backward()
        replica.step(optimizer, {"loss": loss, "name": "text"})


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (math.nan, "nan"),
        (torch.tensor(math.inf), "inf"),
        (torch.tensor([math.nan], requires_grad=True), "nan"),
    ],
)
def test_a_logged_nan_is_reported_once(capsys: pytest.CaptureFixture[str], loss: Any, what: str) -> None:
    text = said(capsys, lambda replica: logging(replica, [1.0] * 49 + [loss] * 60), devices=1)
    assert text == f"polyxla: loss is {what} at step 50\n"


def test_a_nan_in_the_last_step_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, lambda replica: logging(replica, [1.0, 1.0, math.nan]), devices=2)
    assert text == "polyxla: loss is nan at step 3\n"


def compiling(
    counters: Any, compiled: set[int], steps: int = 12, *, by_replica: bool = True, observer: bool = False
) -> Callable[[Replica], None]:
    """Return a loop of which some steps compile."""

    def train(replica: Replica) -> None:
        replica.counters = lambda: counters  # type: ignore[method-assign]
        if observer:
            replica.add_listener(Observer(replica))
        module = shared(replica)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        for step in range(1, steps + 1):
            module(torch.ones(2, 4)).sum().backward()
            if by_replica:
                counters.compiles += step in compiled
                replica.step(optimizer)
            else:
                optimizer.step()
                counters.compiles += step in compiled

    return train


@pytest.mark.parametrize("by_replica", [True, False])
def test_late_compilations_are_reported_with_their_line_and_the_others_are_not(
    counters: Any, capsys: pytest.CaptureFixture[str], by_replica: bool
) -> None:
    train = compiling(counters, {1, 2, 5}, by_replica=by_replica)
    assert said(capsys, train, devices=1) == (
        "polyxla: step 5 compiled a program in 0.5 s: another input shape (replica.loader would show it), "
        "another Python path, or a changed constant "
        f"(packages/training/tests/{line(train, 10 if by_replica else 12)})\n"
    )


def test_many_late_compilations_are_summed_up(counters: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, compiling(counters, set(range(1, 13))), devices=1).splitlines()
    assert [line.partition(" compiled")[0] for line in lines[:3]] == [f"polyxla: step {n}" for n in (3, 4, 5)]
    assert lines[3].startswith("polyxla: 3 steps have compiled late; further ones are not reported.")
    assert len(lines) == 4


def test_beside_an_observer_nothing_is_reported_twice(
    counters: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, compiling(counters, {1, 2, 5}, observer=True), devices=1)
    assert text.count("step 5 compiled") == 1


def test_a_shape_that_changed_is_named_in_a_loop_that_steps_the_optimizer_itself(
    counters: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(replica: Replica) -> None:
        module, optimizer = counted(replica, counters)
        shapes: list[torch.Size] = []
        for (batch,) in replica.loader([(torch.ones(n, 4),) for n in (8, 8, 8, 8, 3, 8)]):
            # The request for this batch has submitted the program of the one before.
            counters.compiles += bool(shapes) and shapes[-1] not in shapes[:-1]
            shapes.append(batch.shape)
            module(batch).sum().backward()
            optimizer.step()

    text = said(capsys, train, devices=1)
    assert text.startswith(
        "polyxla: step 5 compiled a program in 0.5 s: batch[0] [8, 4] float32 -> [3, 4] float32 ("
    )


def test_the_first_evaluation_may_compile(counters: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def train(replica: Replica) -> None:
        module, optimizer = counted(replica, counters)
        training = replica.loader([torch.ones(2, 4)] * 4)
        evaluation = replica.loader([torch.ones(3, 4)] * 2)
        for epoch in range(3):
            for batch in training:
                module(batch).sum().backward()
                replica.step(optimizer)
            for batch in evaluation:
                counters.compiles += epoch == 0
                with torch.no_grad():
                    module(batch)

    assert said(capsys, train, devices=1) == ""


def test_logged_values_are_read_three_steps_later(capsys: pytest.CaptureFixture[str]) -> None:
    def train(replica: Replica) -> None:
        module = shared(replica)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        for step in range(1, 56):
            module(torch.ones(2, 4)).sum().backward()
            replica.step(optimizer, {"loss": math.nan if step == 50 else 1.0})
            print(f"after step {step}", file=sys.stderr)

    before, _, after = said(capsys, train, devices=1).partition("polyxla: loss is nan at step 50\n")
    assert before.endswith("after step 52\n")
    assert after.startswith("after step 53\n")


def test_the_first_two_steps_of_each_optimizer_may_compile(
    counters: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(replica: Replica) -> None:
        replica.counters = lambda: counters  # type: ignore[method-assign]
        modules = [shared(replica), shared(replica)]
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.0) for module in modules]
        for step in range(6):
            modules[step % 2](torch.ones(2, 4)).sum().backward()
            counters.compiles += step in {0, 1, 2, 3, 5}
            replica.step(optimizers[step % 2])

    lines = said(capsys, train, devices=1).splitlines()
    assert [line.partition(" compiled")[0] for line in lines] == ["polyxla: step 6"]


def test_of_an_updates_batches_the_last_are_compared(
    counters: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(replica: Replica) -> None:
        module, optimizer = counted(replica, counters)
        sizes = (8, 8, 8, 8, 3, 8, 8, 3)
        for number, (batch,) in enumerate(replica.loader([(torch.ones(size, 4),) for size in sizes]), 1):
            module(batch).sum().backward()
            if number % 2 == 0:
                counters.compiles += number > 4
                replica.step(optimizer)

    third, fourth = said(capsys, train, devices=1).splitlines()
    assert "step 3 compiled a program in 0.5 s: the same inputs: another Python path" in third
    assert "step 4 compiled a program in 0.5 s: batch[0] [8, 4] float32 -> [3, 4] float32 (" in fourth


@pytest.mark.parametrize(
    ("sizes", "compared"),
    [
        pytest.param([1 << 18, 5, 7], [5, 7], id="a megabyte"),
        pytest.param([1 << 19, 1 << 20], [1 << 19], id="one tensor that is larger"),
        pytest.param(range(1, 20), range(1, 9), id="few tensors"),
    ],
)
def test_only_the_smallest_parameters_are_read_at_the_end(sizes: list[int], compared: list[int]) -> None:
    weights = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    replica: Any = SimpleNamespace(modules={})
    trained = TrainedParameters(replica)
    trained.see(torch.optim.SGD(weights))
    samples = trained.read(None, 1)
    assert [sample.name.partition("[")[2] for sample in samples] == [f"{size}]" for size in compared]


def test_a_defect_of_the_watch_does_not_end_the_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("defect")

    monkeypatch.setattr("polyxla_training.observe.own_loop.step_watch.StepWatch.step", fail)
    text = said(capsys, lambda replica: logging(replica, [1.0] * 5), devices=1)
    assert (
        text == "polyxla: the loop is no longer watched: KeyError: 'defect'; POLYXLA_OBSERVE=off avoids it\n"
    )


def test_torch_is_left_as_it_was_after_an_error() -> None:
    def fail(replica: Replica) -> None:
        assert loop_watch._receivers
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch(fail, runtime="fake", devices=1)


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYXLA_OBSERVE", "no")
    with pytest.raises(UsageError, match="POLYXLA_OBSERVE=no is neither on nor off"):
        launch(print, runtime="fake", devices=1)
