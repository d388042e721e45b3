"""The listener that sees what a training compiles, reads, waits for and reaches."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from polyxla.console import say
from polyxla.hookspecs import hookimpl
from polyxla_training.observe.chip_peaks import utilization
from polyxla_training.observe.compilations import Compilations, Compiled, warm_up_steps
from polyxla_training.observe.compile_budget import Budget
from polyxla_training.observe.logged_values import Readings
from polyxla_training.observe.step_counters import StepCounters
from polyxla_training.observe.summary import Summary
from polyxla_training.observe.throughput import Pace, Window

if TYPE_CHECKING:
    from polyxla.contracts.counters import Counters, Memory
    from polyxla.replica.loader import Loader
    from polyxla.replica.replica import Replica
    from polyxla_training.observe.run_log import RunLog


class Observer:
    """Says in a line what each compilation was for, which lines make the host wait, and how fast it all goes.

    Add it on ordinal 0, before the first step: ``replica.add_listener(Observer(replica))``. It belongs to
    the replica's thread. Counters are those of the process, whose other replicas count as well.

    Args:
        replica: whose steps are observed.
        every_n_steps: how often logged tensors are read, which waits for the device.
        log: where events are written besides; None for nowhere.
        readings: the numbers that other listeners read too.
        module: what is trained, to name its ``training_step``; None in a loop of one's own.
        compile_budget: programs that may be compiled after the first two steps (three under torch.compile)
            and the first evaluation; None for any number.
        on_budget: ``warn`` or ``raise`` (`CompileBudgetError`), when there are more.
        shows: whether the summary is said, and what is logged is read though no `log` keeps it.

    Raises:
        UsageError: the budget makes no sense.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        every_n_steps: int = 50,
        log: RunLog | None = None,
        readings: Readings | None = None,
        module: Any = None,
        compile_budget: int | None = None,
        on_budget: str = "warn",
        shows: bool = True,
    ) -> None:
        self._shows = shows
        budget = Budget(compile_budget, on_budget)
        counters = replica.counters()
        self._replica, self._every, self._log = replica, every_n_steps, log
        self._readings = readings or Readings(counters)
        self._is_shared = replica.world.shares_process
        self._step_counters = self._counting(counters, budget, module) if counters else None
        self._budget = budget
        self._pace = Pace()
        self._steps = 0
        self._whole = Window()
        self._warm_up_s = 0.0
        self._step_times: list[float] = []
        self._memory: Memory | None = None
        self._told_names = 0
        self._loader: Loader | None = None

    def _counting(self, counters: Counters, budget: Budget, module: Any) -> StepCounters:
        compilations = Compilations(counters, budget, module, is_shared=self._is_shared)
        return StepCounters(counters, self._readings, compilations, is_shared=self._is_shared)

    @hookimpl
    def polyxla_step_finished(self, step: int, logged: Mapping[str, Any]) -> None:
        """Compare the counters; every n-th step, read what is logged and cut a window."""
        self._pace.step()
        self._steps += 1
        self._loader = self._replica.current_loader
        if self._step_counters:
            self._tell_compiled(self._step_counters.step(step, self._loader, self._write))
        if self._steps == warm_up_steps():
            self._warm_up_s = self._pace.cut(self._loader).seconds
        if step % self._every == 0:
            self._read(step, logged)

    def _read(self, step: int, logged: Mapping[str, Any]) -> None:
        # A read waits for the device: none where nobody would see what was read.
        values = self._readings.of(step, logged) if self._shows or self._log else {}
        self._pace.wait()
        window = self._cut()
        if self._step_counters:
            self._memory = self._step_counters.memory() or self._memory
        memory = asdict(self._memory) if self._memory else None
        mfu = self._mfu(window.step_s)
        rates = window.as_json(self._replica.world_size)
        self._write("step", step=step, values=values, memory=memory, mfu=mfu, **rates)
        self._tell_not_finite()

    def _cut(self) -> Window:
        window = self._pace.cut(self._loader)
        self._whole += window
        if window.step_s is not None:
            self._step_times.append(window.step_s)
        return window

    def _tell_compiled(self, compiled: Compiled | None) -> None:
        if compiled and self._step_counters:
            self._write("compile", **compiled.as_json())
            self._step_counters.compilations.pay(compiled)

    def _tell_not_finite(self) -> None:
        for name, step in list(self._readings.not_finite.items())[self._told_names :]:
            self._write("not_finite", name=name, step=step)
        self._told_names = len(self._readings.not_finite)

    @hookimpl
    def polyxla_metrics_ready(self, step: int, metrics: Mapping[str, float]) -> None:
        """Leave the evaluation out of the steps' time, and hear what it compiled."""
        if self._step_counters:
            self._tell_compiled(self._step_counters.between(step, self._replica.current_loader))
        self._pace.leave_out()
        self._readings.check(step, metrics)
        self._write("metrics", step=step, values=dict(metrics))
        self._tell_not_finite()

    @hookimpl
    def polyxla_replica_stopped(self, error: BaseException | None) -> None:
        """Say what the run came to, also after an error."""
        self._cut()
        summary = self.summary()
        findings = self._step_counters.close() if self._step_counters else []
        if self._steps and self._shows:
            say(str(summary))
        reason = f"{type(error).__name__}: {error}" if error else None
        self._write("end", summary=summary.as_json(), findings=findings, error=reason)
        if self._log:
            self._log.close()

    def summary(self) -> Summary:
        """Return the totals so far."""
        whole = self._whole
        step_s = statistics.median(self._step_times) if self._step_times else None
        summary = Summary(
            steps=self._steps,
            is_shared=self._is_shared,
            seconds=self._warm_up_s + whole.seconds,
            unexpected=self._budget.spent,
            wait_share=whole.wait_share,
            records_per_s=whole.records_per_s(self._replica.world_size),
            step_s=step_s,
            mfu=self._mfu(step_s),
            peak_bytes=(self._memory.peak_bytes or self._memory.used_bytes) if self._memory else None,
        )
        if self._step_counters:
            self._step_counters.add_to(summary)
        return summary

    def _mfu(self, step_s: float | None) -> float | None:
        step_counters = self._step_counters
        if not step_counters or not step_s or not step_counters.flops_per_step:
            return None
        return utilization(step_counters.flops_per_step, step_s, step_counters.chip)

    def _write(self, event: str, **fields: Any) -> None:
        if self._log:
            self._log.write(event, **fields)
