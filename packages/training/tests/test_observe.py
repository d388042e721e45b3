"""What the observer makes of counters, batches and logged values, on a counters that the test turns."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import polyxla
from polyxla import UsageError, World, launch
from polyxla.contracts.counters import Counters, Counts, Memory
from polyxla.testing import PluginInstaller, fake
from polyxla_training import Trainer
from polyxla_training.observe import CompileBudgetError, Observer, LoggedValues, RunLog, read_run
from polyxla_training.observe.chip_peaks import CHIP_PEAKS, chip_peak, utilization
from polyxla_training.observe.compilations import warm_up_steps
from polyxla_training.observe.compile_budget import CompileBudget
from polyxla_training.observe.tracing.findings import Finding
from polyxla_training.observe.tracing.flops import WITH_BACKWARD, flops
from polyxla_training.observe.input_shapes import describe_changes, signatures
from polyxla_training.observe.throughput import ThroughputMeter
from polyxla_training.observe.tracing.trace_schedule import is_torch_compiled
from polyxla_training.observe.tracing.trace_schedule import FIRST_STEPS, MAX_TRACED_STEPS, TraceSchedule
from polyxla_training.observe.tracing.tracer import Tracer

TIMEOUT_S = 60.0
HERE = Path(__file__).name


class Turned(Counters):
    """Counts what the test says."""

    def __init__(self) -> None:
        self.compiles = self.executions = self.reads = self.hits = 0
        self.fell_back: dict[str, int] = {}
        self.told: Memory | None = None

    def counts(self) -> Counts:
        return Counts(self.compiles, self.executions, self.reads, self.hits)

    def compile_s(self) -> float:
        return 0.5 * self.compiles

    def fallbacks(self) -> dict[str, int]:
        return dict(self.fell_back)

    def memory(self) -> Memory | None:
        return self.told


COUNTERS = Turned()


@torch.library.custom_op("polyxla_test::slow", mutates_args=())
def slow(value: torch.Tensor) -> torch.Tensor:
    """Is carried out by the host, as the counters tells."""
    COUNTERS.reads += 1
    COUNTERS.fell_back["polyxla_test::slow"] = COUNTERS.fell_back.get("polyxla_test::slow", 0) + 1
    return value + 1


@pytest.fixture
def counters() -> Iterator[Turned]:
    COUNTERS.__init__()  # type: ignore[misc]
    yield COUNTERS
    assert not modes(), "a tracer was left behind"


def modes() -> list[Any]:
    found: list[Any] = _get_current_function_mode_stack()
    return found


def batch(records: int = 32) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(records, 4), "y": torch.zeros(records, dtype=torch.int64)}


class Run:
    """A loop of three lines around an observer."""

    replica: Any
    training: Any

    def __init__(
        self, counters: Counters | None, folder: Path | None = None, *, shared: bool = False, **options: Any
    ) -> None:
        self.replica = SimpleNamespace(
            counters=lambda: counters, world_size=2, runtime="test", kind="TEST", input=None, steps=0
        )
        self.replica.world = World(2, 0, 0, 2, process_count=1 if shared else 2)
        self.training = SimpleNamespace(batch=batch(), records=0, waited_s=0.0)
        log = RunLog(folder) if folder else None
        if log:
            log.start(self.replica, settings={})
        self.folder = folder
        self.observer = Observer(self.replica, log=log, **{"every_n_steps": 2, **options})

    def step(self, loss: Any = 1.0, records: int = 32) -> None:
        self.replica.steps += 1
        self.replica.current_loader = self.training
        self.training.batch = batch(records)
        self.training.records += records
        self.observer.polyxla_step_finished(step=self.replica.steps, logged={"loss": loss})

    def evaluation(self, records: int, loss: float = 1.0) -> None:
        self.replica.current_loader = SimpleNamespace(batch=batch(records), records=records, waited_s=0.0)
        self.observer.polyxla_metrics_ready(step=self.replica.steps, metrics={"val_loss": loss})

    def stop(self, error: BaseException | None = None) -> list[dict[str, Any]]:
        self.observer.polyxla_replica_stopped(error=error)
        return read_run(self.folder) if self.folder else []


def kinds(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


# Inputs


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        pytest.param(
            [torch.zeros(4, 2)],
            [torch.zeros(3, 2)],
            "batch[0] [4, 2] float32 -> [3, 2] float32",
            id="shape",
        ),
        pytest.param(
            {"x": torch.zeros(4), "y": torch.zeros(4)},
            {"x": torch.zeros(4), "y": torch.zeros(4, dtype=torch.int64)},
            "batch['y'] [4] float32 -> [4] int64",
            id="dtype",
        ),
        pytest.param((1, [None]), (1, ["a"]), "batch[1][0] NoneType -> str", id="no-tensor"),
        pytest.param(
            [torch.zeros(1)],
            [torch.zeros(1)] * 2,
            "batch of 1 parts -> 2: batch[0], batch[1]",
            id="another-structure",
        ),
        pytest.param([torch.zeros(4)], [torch.ones(4)], None, id="other-values"),
    ],
)
def test_changed_inputs_are_named(before: Any, now: Any, said: str | None) -> None:
    assert describe_changes(now, signatures(before)) == said


def test_many_changes_are_cut_short() -> None:
    said = describe_changes([torch.zeros(2)] * 9, signatures([torch.zeros(3)] * 9))
    assert said is not None
    assert said.count("->") == 4
    assert said.endswith(", and 5 more")


@given(
    st.recursive(
        st.lists(st.integers(0, 5), max_size=3).map(torch.zeros),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
        max_leaves=6,
    )
)
def test_the_same_inputs_never_differ(nest: Any) -> None:
    assert describe_changes(nest, signatures(nest)) is None


# CompileBudget


def test_a_budget_is_spent_before_it_warns_and_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    budget = CompileBudget(2, "warn")
    for number in range(5):
        budget.spend(1, f"reason {number}")
    assert budget.spent == 5
    [line] = capsys.readouterr().err.splitlines()
    assert "3 programs" in line
    assert "compile_budget=2" in line
    assert "reason 2" in line


def test_a_strict_budget_raises() -> None:
    budget = CompileBudget(1, "raise")
    budget.spend(1, "a reason")
    with pytest.raises(CompileBudgetError, match="another reason"):
        budget.spend(1, "another reason")


def test_without_a_budget_anything_goes(capsys: pytest.CaptureFixture[str]) -> None:
    CompileBudget(None, "raise").spend(1000, "a reason")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("allowed", "then"), [(-1, "warn"), (1, "panic")])
def test_a_budget_that_makes_no_sense_is_refused(allowed: int, then: str) -> None:
    with pytest.raises(UsageError):
        CompileBudget(allowed, then)


# Chips


def test_utilization_is_of_one_devices_share_of_a_chip() -> None:
    assert utilization(275e12, 2.0, "TPU v4") == pytest.approx(0.5)
    # Two devices share a chip of v3.
    assert utilization(123e12 / 2, 1.0, "TPU v3") == pytest.approx(1.0)


@pytest.mark.parametrize("kind", [None, "", "cpu", "TPU v99"])
def test_an_unknown_chip_has_no_utilization(kind: str | None) -> None:
    assert utilization(1e12, 1.0, kind) is None


def test_every_generation_is_known_under_libtpus_names_too() -> None:
    assert chip_peak("TPU v5 lite") is CHIP_PEAKS["TPU v5e"]
    assert chip_peak("TPU v6 lite") is CHIP_PEAKS["TPU v6e"]
    assert all(chip_peak(name) for name in CHIP_PEAKS)


# ThroughputMeter


def test_a_window_holds_the_steps_time_without_evaluations() -> None:
    now = [100.0]
    meter = ThroughputMeter(clock=lambda: now[0])
    loader = SimpleNamespace(records=0, waited_s=0.0)
    for _ in range(4):
        now[0] += 2.0
        loader.records += 10
        loader.waited_s += 0.5
        meter.step()
    now[0] += 50.0
    meter.exclude()
    now[0] += 2.0
    loader.records += 10
    meter.step()
    window = meter.next_window(loader)
    assert (window.steps, window.seconds, window.records) == (5, 10.0, 50)
    assert window.step_s == 2.0
    assert window.wait_share == 0.2
    assert window.records_per_s(world_size=4) == 20.0


def test_the_next_window_begins_where_the_last_ended() -> None:
    now = [0.0]
    meter = ThroughputMeter(clock=lambda: now[0])
    for seconds in (3.0, 1.0):
        now[0] += seconds
        meter.step()
        window = meter.next_window(None)
        assert window.seconds == seconds
        assert window.records_per_s(1) is window.wait_share is None


def test_another_loaders_records_are_counted_from_its_beginning() -> None:
    meter = ThroughputMeter()
    meter.step()
    meter.next_window(SimpleNamespace(records=100, waited_s=9.0))
    meter.step()
    assert meter.next_window(SimpleNamespace(records=30, waited_s=1.0)).records == 30


# LoggedValues


class Scalar:
    """A value that waits for the device whenever it is read."""

    def __init__(self, counters: Turned, value: float) -> None:
        self._counters, self._value = counters, value

    def __float__(self) -> float:
        self._counters.reads += 1
        return self._value


def test_a_step_is_read_once_for_all_listeners(counters: Turned) -> None:
    logged_values = LoggedValues(counters)
    for _ in range(3):
        assert logged_values.read(1, {"loss": Scalar(counters, 2.0)}) == {"loss": 2.0}
    assert logged_values.read(2, {"loss": Scalar(counters, 3.0)}) == {"loss": 3.0}
    assert counters.reads == logged_values.host_reads == 2


def test_what_is_no_number_is_said_once_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    logged_values = LoggedValues()
    for step in range(3, 6):
        logged_values.read(step, {"loss": math.nan, "norm": math.inf if step == 5 else 1.0})
    assert capsys.readouterr().err.splitlines() == [
        "polyxla: loss is nan at step 3",
        "polyxla: norm is inf at step 5",
    ]
    assert logged_values.not_finite == {"loss": 3, "norm": 5}


# Observer


def test_compilations_are_explained(
    counters: Turned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(counters, tmp_path)
    for records in (32, 32, 32, 7, 32, 32):
        counters.compiles += run.replica.steps in {0, 1, 3, 5}
        run.step(records=records)
    told = kinds(run.stop(), "compile")
    assert [(one["step"], one["expected"]) for one in told] == [
        (1, True),
        (2, True),
        (4, False),
        (6, False),
    ]
    assert (
        told[2]["cause"] == "batch['x'] [32, 4] float32 -> [7, 4] float32, batch['y'] [32] int64 -> [7] int64"
    )
    assert told[3]["cause"] == "the same inputs: another Python path or a changed constant"
    assert all(HERE in one["line"] and one["seconds"] == 0.5 for one in told)
    said = [line for line in capsys.readouterr().err.splitlines() if " compiled a program" in line]
    assert len(said) == 4
    assert ", as expected: the first step" in said[0]


def test_a_second_step_with_other_inputs_is_not_expected(counters: Turned, tmp_path: Path) -> None:
    run = Run(counters, tmp_path)
    for records in (32, 7):
        counters.compiles += 1
        run.step(records=records)
    assert [one["expected"] for one in kinds(run.stop(), "compile")] == [True, False]


def test_a_steps_pieces_are_told(counters: Turned, tmp_path: Path) -> None:
    run = Run(counters, tmp_path)
    for pieces in (1, 1, 1, 3):
        counters.executions += pieces
        counters.compiles += pieces > 1
        run.step()
    [told] = kinds(run.stop(), "compile")
    assert told["cause"].endswith("; the step ran in 3 pieces, not 1")


def test_replicas_of_one_process_are_counted_together(
    counters: Turned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(counters, tmp_path, shared=True)
    for _ in range(3):
        counters.compiles += 1
        run.step()
    events = run.stop()
    assert "or another replica of this process" in kinds(events, "compile")[-1]["cause"]
    assert events[-1]["summary"]["is_shared"]
    assert "counted over all replicas of this process" in capsys.readouterr().err


def test_evaluations_are_told_apart_from_steps(counters: Turned, tmp_path: Path) -> None:
    run = Run(counters, tmp_path, compile_budget=0)
    run.step()
    for records in (50, 50, 9):
        counters.compiles += 1
        run.evaluation(records)
        run.step()
    told = kinds(run.stop(), "compile")
    assert [one["cause"].partition(",")[0] for one in told] == ["the first evaluation"] + [
        "in an evaluation"
    ] * 2
    assert "the same inputs" in told[1]["cause"]
    assert "[50, 4] float32 -> [9, 4] float32" in told[2]["cause"]
    assert [one["expected"] for one in told] == [True, False, False]


def test_metrics_of_the_steps_are_no_evaluation(counters: Turned, tmp_path: Path) -> None:
    run = Run(counters, tmp_path)
    run.step()
    counters.compiles += 1
    run.observer.polyxla_metrics_ready(step=1, metrics={"loss": 1.0})
    assert kinds(run.stop(), "compile")[0]["cause"] == "metrics of the steps"


def test_over_budget_the_run_ends_and_its_log_says_why(counters: Turned, tmp_path: Path) -> None:
    run = Run(counters, tmp_path, compile_budget=1, on_budget="raise")
    for _ in range(3):
        counters.compiles += 1
        run.step()
    counters.compiles += 1
    with pytest.raises(CompileBudgetError) as raised:
        run.step()
    events = run.stop(raised.value)
    assert len(kinds(events, "compile")) == 4
    assert events[-1]["error"].startswith("CompileBudgetError: 2 programs")


def test_polyxlas_own_reads_are_not_the_persons(counters: Turned, tmp_path: Path) -> None:
    run = Run(counters, tmp_path)
    for _ in range(10):
        run.step(loss=Scalar(counters, 1.0))
    assert counters.reads == 5
    summary = run.stop()[-1]["summary"]
    assert summary["reads_per_step"] == 0


def test_the_persons_reads_are_counted(counters: Turned, tmp_path: Path) -> None:
    run = Run(counters, tmp_path)
    for _ in range(10):
        counters.reads += 3
        run.step(loss=Scalar(counters, 1.0))
    run.evaluation(5)
    assert run.stop()[-1]["summary"]["reads_per_step"] == 3


def test_rates_and_memory_are_logged(counters: Turned, tmp_path: Path) -> None:
    counters.told = Memory(100, 1000, 300)
    counters.hits = 2
    run = Run(counters, tmp_path)
    counters.hits += 3
    counters.fell_back["aten::nonzero"] = 4
    for _ in range(6):
        run.step()
    events = run.stop()
    steps = kinds(events, "step")
    assert [one["step"] for one in steps] == [2, 4, 6]
    assert steps[0]["step_s"] is None, "the first two steps compile"
    assert all(one["records_per_s"] == pytest.approx(2 * 32 / one["step_s"]) for one in steps[1:])
    assert steps[0]["memory"] == {"used_bytes": 100, "limit_bytes": 1000, "peak_bytes": 300}
    summary = events[-1]["summary"]
    assert (summary["peak_bytes"], summary["cache_hits"], summary["steps"]) == (300, 3, 6)
    assert summary["fallbacks"] == {"aten::nonzero": 4}


def test_utilization_comes_from_the_traced_steps(counters: Turned, tmp_path: Path) -> None:
    counters.chip = "TPU v4"
    run = Run(counters, tmp_path)
    for _ in range(4):
        torch.zeros(8, 16) @ torch.zeros(16, 4)  # Nothing to train, so no backward pass.
        run.step()
    summary = run.stop()[-1]["summary"]
    assert summary["flops_per_step"] == 2 * 8 * 16 * 4
    assert summary["mfu"] == pytest.approx(1024 / summary["step_s"] / 275e12)
    assert summary["chip"] == "TPU v4"


def test_without_counters_there_is_the_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(None, tmp_path)
    for _ in range(4):
        run.step()
    summary = run.stop()[-1]["summary"]
    assert summary["records_per_s"] > 0
    assert summary["mfu"] is None
    assert "MFU" in capsys.readouterr().err


def test_a_value_that_is_no_number_leaves_the_log_valid(counters: Turned, tmp_path: Path) -> None:
    run = Run(counters, tmp_path)
    for loss in (1.0, 1.0, 1.0, math.nan):
        run.step(loss=loss)
    run.evaluation(5, loss=math.inf)
    events = run.stop()
    assert [(one["name"], one["step"]) for one in kinds(events, "not_finite")] == [
        ("loss", 4),
        ("val_loss", 4),
    ]
    assert kinds(events, "step")[-1]["values"] == {"loss": None}
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_in_ones_own_loop_it_is_a_listener(
    counters: Turned, on_fake: None, capsys: pytest.CaptureFixture[str]
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


# Tracing


def test_the_line_that_falls_back_is_found(counters: Turned) -> None:
    tracer = Tracer(counters)
    tracer.start()
    for _ in range(3):
        slow(torch.zeros(1))
    assert tracer.stop()
    [(finding, count)] = tracer.found.items()
    assert (finding.kind, finding.op, count) == ("fallback", "polyxla_test::slow", 3)
    assert finding.line.endswith(
        f"{HERE}:{test_the_line_that_falls_back_is_found.__code__.co_firstlineno + 4}"
    )


def test_what_happens_outside_is_not_seen(counters: Turned) -> None:
    tracer = Tracer(counters)
    slow(torch.zeros(1))
    tracer.start()
    tracer.stop()
    slow(torch.zeros(1))
    assert not tracer.found


class Other(TorchFunctionMode):
    """Somebody else's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_of_others_end_in_their_own_turn(counters: Turned) -> None:
    tracer, other = Tracer(counters), Other()
    with other:
        tracer.start()
        slow(torch.zeros(1))
    assert modes() == [tracer], "it began within the other, and continues after its end"
    with other:
        assert tracer.stop()
        slow(torch.zeros(1))
        assert modes() == [other], "it ended within the other"
    assert sum(tracer.found.values()) == 1


def test_a_default_device_ends_in_its_own_turn(counters: Turned) -> None:
    tracer = Tracer(counters)
    with torch.device("meta"):
        tracer.start()
        assert torch.zeros(1).is_meta
    assert modes() == [tracer]
    torch.set_default_device("meta")
    try:
        slow(torch.zeros(1, device="cpu"))
        assert tracer.stop()
        tracer.start()
    finally:
        torch.set_default_device(None)
        # Which torch 2.9's get_default_device does not take for an answer.
        del torch._GLOBAL_DEVICE_CONTEXT.device_context
    assert modes() == [tracer]
    assert tracer.stop()


def test_what_a_hook_of_the_backward_pass_reads_is_found(counters: Turned) -> None:
    tracer = Tracer(counters)
    weight = torch.ones(1, requires_grad=True)
    tracer.start()
    loss = weight * 2
    loss.register_hook(lambda gradient: slow(gradient.detach()))
    loss.backward()
    assert tracer.stop()
    assert weight.grad is not None
    [finding] = tracer.found
    assert (finding.kind, finding.op) == ("fallback", "polyxla_test::slow")
    assert finding.line.endswith(
        f"{HERE}:{test_what_a_hook_of_the_backward_pass_reads_is_found.__code__.co_firstlineno + 6}"
    )


def test_an_error_of_the_backward_pass_leaves_no_mode(counters: Turned) -> None:
    tracer = Tracer(counters)
    tracer.start()
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.zeros(1).backward()
    assert modes() == [tracer]
    assert tracer.stop()


def test_of_threads_only_a_reader_is_blamed(counters: Turned) -> None:
    class Reading(Turned):
        def counts(self) -> Counts:
            self.reads += 1
            return super().counts()

    found = {}
    for is_shared in (False, True):
        tracer = Tracer(Reading(), is_shared=is_shared)
        tensor = torch.zeros(1)
        tracer.start()
        tensor.item()
        tensor.neg()
        tracer.stop()
        found[is_shared] = [finding.op for finding in tracer.found]
    assert found == {
        False: ["torch.Tensor.item", "torch.Tensor.neg"],
        True: ["torch.Tensor.item"],
    }


def test_torch_compile_does_not_see_it(counters: Turned) -> None:
    tracer, seen = Tracer(counters), []

    def compiler(graph: Any, _: Any) -> Any:
        seen.append((tracer.is_on, modes()))
        return graph.forward

    double = torch.compile(lambda value: value * 2, backend=compiler, fullgraph=True)
    assert warm_up_steps() == 2
    tracer.start()
    try:
        assert [double(torch.ones(1)).item() for _ in range(2)] == [2.0, 2.0]
        assert not tracer.stop(), "it has not seen all"
        assert double(torch.ones(1)).item() == 2.0
        assert seen == [(False, [])], "and it is compiled once"
        assert is_torch_compiled()
        assert warm_up_steps() == 3
    finally:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()


def test_no_dispatch_mode_is_ever_entered() -> None:
    # Under one, torch_xla's collectives return other values than without.
    [folder] = polyxla.__path__
    sources = {path: path.read_text() for path in Path(folder).rglob("*.py")}
    assert len(sources) > 50
    assert not [
        path for path, text in sources.items() if "TorchDispatchMode" in text or "FlopCounter" in text
    ]


def test_a_forked_child_is_not_traced(counters: Turned) -> None:
    tracer = Tracer(counters)
    tracer.start()
    child = os.fork()
    if child == 0:
        os._exit(0 if not modes() else 1)
    deadline = time.monotonic() + TIMEOUT_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ended[1] == 0
    assert tracer.stop()


# Operations


def counted(call: Any) -> int:
    """Return what the tracer counts of a call."""
    tracer = Tracer(Turned())
    tracer.start()
    call()
    tracer.stop()
    return tracer.flops


def by_torch(call: Any) -> int:
    """Return what torch counts of the forward pass alone."""
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel([SDPBackend.MATH]):
        call()
    return int(counter.get_total_flops())


def some(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


CALLS = {
    "linear": lambda: F.linear(some(5, 2, 3), some(4, 3), some(4)),
    "linear-named": lambda: F.linear(input=some(5, 3), weight=some(4, 3)),
    "matmul": lambda: some(2, 3) @ some(3, 4),
    "matmul-broadcast": lambda: some(6, 1, 2, 3).matmul(some(5, 3, 4)),
    "mm": lambda: torch.mm(some(2, 3), some(3, 4)),
    "bmm": lambda: some(6, 2, 3).bmm(some(6, 3, 4)),
    "addmm": lambda: torch.addmm(some(4), some(2, 3), some(3, 4)),
    "baddbmm": lambda: torch.baddbmm(some(6, 2, 4), some(6, 2, 3), some(6, 3, 4)),
    "conv1d": lambda: F.conv1d(some(2, 3, 9), some(4, 3, 3), stride=2),
    "conv2d": lambda: torch.nn.Conv2d(6, 4, 3, groups=2, padding=1)(some(2, 6, 8, 7)).detach(),
    "conv3d": lambda: torch.conv3d(some(1, 2, 4, 4, 4), some(3, 2, 2, 2, 2)),
    "transposed": lambda: F.conv_transpose2d(some(2, 3, 5, 5), some(3, 4, 3, 3), stride=2),
    "attention": lambda: F.scaled_dot_product_attention(some(2, 4, 5, 8), some(2, 4, 7, 8), some(2, 4, 7, 8)),
    "einsum": lambda: torch.einsum("bij,bjk->bik", some(2, 3, 4), some(2, 4, 5)),
    "einsum-dots": lambda: torch.einsum("...ij, kj -> ...ik", some(2, 6, 3, 4), some(5, 4)),
    "heads": lambda: torch.nn.MultiheadAttention(8, 2)(*[some(5, 3, 8)] * 3, need_weights=False),
    "heads-unbatched": lambda: torch.nn.MultiheadAttention(8, 2, kdim=6, vdim=4)(
        some(5, 8), some(7, 6), some(7, 4)
    ),
    "encoder": lambda: torch.nn.TransformerEncoderLayer(8, 2, 16)(some(5, 3, 8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_forward_pass_is_counted_as_torch_counts_it(name: str) -> None:
    with torch.no_grad():
        assert counted(CALLS[name]) == by_torch(CALLS[name]) > 0


def test_recurrence_is_counted_per_record() -> None:
    network = torch.nn.LSTM(3, 4, num_layers=2)
    whole = 2 * (5 * 2) * 16 * (3 + 4 + 4 + 4)
    with torch.no_grad():
        assert counted(lambda: network(some(5, 2, 3))) == whole
        packed = torch.nn.utils.rnn.pack_sequence([some(5, 3), some(4, 3)])
        assert counted(lambda: network(packed)) == whole * 9 // 10


def test_what_is_trained_costs_its_backward_pass_too() -> None:
    weight = torch.ones(3, 4, requires_grad=True)
    forward = counted(lambda: some(2, 3) @ weight.detach())
    assert counted(lambda: (some(2, 3) @ weight).sum().backward()) == WITH_BACKWARD * forward


def test_what_is_computed_again_is_not_counted_again() -> None:
    weight = torch.ones(3, 4, requires_grad=True)
    call = lambda: checkpoint(lambda: some(2, 3) @ weight, use_reentrant=False).sum().backward()  # noqa: E731
    assert counted(call) == WITH_BACKWARD * 2 * 2 * 3 * 4


def test_other_functions_are_not_counted() -> None:
    assert flops(torch.add, (some(1), some(1)), {}, some(1)) == 0
    assert counted(lambda: torch.einsum("ij,jk,kl->il", some(2, 3), some(3, 4), some(4, 5))) == 0


# Watching


def _train(counters: Turned, steps: int, reads: Any) -> tuple[TraceSchedule, list[Finding]]:
    schedule, found = TraceSchedule(counters), []
    for step in range(1, steps + 1):
        before = counters.reads
        if reads(step):
            slow(torch.zeros(1))
        found += [finding for finding, _ in schedule.finish_step()]
        schedule.begin_step(counters.reads - before, is_cut=False)
    schedule.close()
    return schedule, found


@pytest.mark.parametrize("every", [1, 2, 7, 50])
def test_a_read_every_few_steps_is_found(counters: Turned, every: int) -> None:
    schedule, found = _train(counters, 4 * every + 20, lambda step: step % every == 0 and step > 10)
    assert len(found) == 1
    assert schedule.findings.steps <= MAX_TRACED_STEPS


def test_where_nothing_reads_the_first_steps_alone_are_traced(counters: Turned) -> None:
    schedule, found = _train(counters, 100, lambda _: False)
    assert (found, schedule.findings.steps) == ([], FIRST_STEPS)


def test_what_is_explained_is_not_traced_again(counters: Turned) -> None:
    schedule, found = _train(counters, 100, lambda _: True)
    assert (len(found), schedule.findings.steps) == (1, FIRST_STEPS)
    assert schedule.findings.as_json()[0]["per_traced_step"] == 1


def test_irregular_reads_do_not_trace_for_ever(counters: Turned) -> None:
    schedule, _ = _train(counters, 400, lambda step: step in {2**n + 5 for n in range(9)})
    assert schedule.findings.steps <= MAX_TRACED_STEPS


# By the Trainer


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


def test_a_trainer_keeps_a_log_of_its_run(on_fake: None, tmp_path: Path) -> None:
    options: Any = {"max_epochs": 2, "log_every_n_steps": 2, "log_dir": str(tmp_path), "progress": False}
    Trainer(runtime="fake", devices=1, **options).fit(Small(), [torch.ones(8, 4)] * 5)
    events = read_run(tmp_path)
    assert events[0]["module"] == "Small"
    assert events[0]["settings"]["max_epochs"] == 2
    assert [one["step"] for one in kinds(events, "step")] == [2, 4, 6, 8, 10]
    assert all(set(one["values"]) == {"loss"} for one in kinds(events, "step"))
    assert events[-1]["summary"]["steps"] == 10
    assert list(tmp_path.glob("events.*")), "TensorBoard's file is there as well"
