"""The listener that reports compilations, host reads, input waits and throughput."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from polyxla import hookimpl
from polyxla.plugin import say
from polyxla_training.observe.compilations import (
    Compilation,
    CompilationTracker,
    CompileBudget,
    warm_up_steps,
)
from polyxla_training.observe.performance import Summary, ThroughputMeter, ThroughputWindow, utilization
from polyxla_training.observe.step_counters import LoggedValues, StepCounters

if TYPE_CHECKING:
    from polyxla import Replica
    from polyxla.plugin import Counters, Loader, Memory
    from polyxla_training.observe.run_log import RunLog


TPU = "TPU"
"""The kind of a replica's device that is a TPU, or that emulates one."""


class AfterListeners:
    """Calls `Observer.finish_listeners` in each step, for trainings whose listeners use collectives."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    @hookimpl(trylast=True)
    def polyxla_step_finished(self) -> None:
        """Runs after all other listeners."""
        self._observer.finish_listeners()


class Observer:
    """Reports the cause of each compilation, the lines that make the host wait, and the throughput.

    Add it on ordinal 0, before the first step: ``replica.add_listener(Observer(replica))``. It belongs to
    the replica's thread. The counters are those of the process; they include its other replicas.

    Args:
        replica: the replica to observe.
        every_n_steps: interval at which logged tensors are read, which waits for the device; the first and
            the last step are always read.
        log: receives the events too; None for no file.
        logged_values: shared with other listeners, so that values are read once, at its own interval.
        module: the Trainer's module, to name the line of its ``training_step``; None in a user's own loop.
        optimizer: its learning rates are logged; None for none.
        compile_budget: number of programs that may be compiled after the first two steps (three under
            torch.compile) and the first evaluation; None for no limit.
        on_budget: ``warn`` or ``raise`` (`CompileBudgetError`) when more are compiled.
        prints_summary: print the summary, and read logged values even without a `log`.

    Raises:
        UsageError: the budget is invalid.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        every_n_steps: int = 50,
        log: RunLog | None = None,
        logged_values: LoggedValues | None = None,
        module: Any = None,
        optimizer: Any = None,
        compile_budget: int | None = None,
        on_budget: str = "warn",
        prints_summary: bool = True,
    ) -> None:
        self._prints_summary = prints_summary
        budget = CompileBudget(compile_budget, on_budget)
        counters = replica.counters()
        self._replica, self._log, self._optimizer = replica, log, optimizer
        self._records = 0
        self._logged_values = logged_values or LoggedValues(counters, every_n_steps)
        self._is_shared = replica.world.shares_process
        self._step_counters = self._make_step_counters(counters, budget, module) if counters else None
        self._budget = budget
        self._throughput = ThroughputMeter()
        self._steps = 0
        self._total = ThroughputWindow()
        self._warm_up_s = 0.0
        self._step_times: list[float] = []
        self._memory: Memory | None = None
        self._unread: tuple[int, Mapping[str, Any]] | None = None
        self._written_names = 0
        self._loader: Loader | None = None

    def _make_step_counters(self, counters: Counters, budget: CompileBudget, module: Any) -> StepCounters:
        compilations = CompilationTracker(counters, budget, module, is_shared=self._is_shared)
        return StepCounters(
            counters,
            self._logged_values,
            compilations,
            is_shared=self._is_shared,
            on_tpu=self._replica.kind == TPU,
        )

    @hookimpl
    def polyxla_step_finished(self, step: int, logged: Mapping[str, Any]) -> None:
        """Compare the counters; every n-th step, and in the first, read the logged values, end a window."""
        self._throughput.step()
        self._steps += 1
        # Taken in each step: a loop may make a new loader for every epoch.
        self._loader = self._replica.current_loader
        if self._step_counters:
            self._report(self._step_counters.step(step, self._loader, self._write))
        # The first steps compile, so they are a window of their own, which no rate includes.
        if self._steps == warm_up_steps():
            self._warm_up_s = self._count(self._throughput.next_window(self._loader)).seconds
        self._unread = (step, logged)
        if self._logged_values.is_due(step):
            self._read()

    @hookimpl
    def polyxla_fit_finished(self) -> None:
        """Read the logged values of the last step, whose number may be no multiple of n."""
        self._read()

    def _read(self) -> None:
        if self._unread is None:
            return
        step, logged = self._unread
        self._unread = None
        # A read waits for the device, so values that nobody would see are not read.
        values = self._logged_values.read(step, logged) if self._prints_summary or self._log else {}
        # The read has waited for the device until the step was finished, so the step ends here and not at
        # its submission.
        self._throughput.extend_step()
        # The first steps are excluded from the windows, all together.
        is_warm = self._steps >= warm_up_steps()
        window = self._next_window() if is_warm else ThroughputWindow()
        if self._step_counters:
            self._memory = self._step_counters.memory() or self._memory
        memory = asdict(self._memory) if self._memory else None
        mfu = self._mfu(window.step_s)
        rates = window.as_json(self._replica.data_world.world_size)
        rates |= {"records": self._records, "lr": self._learning_rates() if self._log else []}
        self._write("step", step=step, values=values, memory=memory, mfu=mfu, **rates)
        self._report_not_finite()

    def _learning_rates(self) -> list[float]:
        """Return the rate of each group of parameters. Reads the device if a rate is a tensor on it."""
        groups = self._optimizer.param_groups if self._optimizer is not None else ()
        return [float(group["lr"]) for group in groups if "lr" in group]

    def _count(self, window: ThroughputWindow) -> ThroughputWindow:
        self._records += (window.records or 0) * self._replica.data_world.world_size
        return window

    def _next_window(self) -> ThroughputWindow:
        window = self._count(self._throughput.next_window(self._loader))
        self._total += window
        if window.step_s is not None:
            self._step_times.append(window.step_s)
        return window

    def _report(self, compilation: Compilation | None) -> None:
        if compilation and self._step_counters:
            # Log first: spending the budget may raise.
            self._write("compile", **compilation.as_json())
            self._step_counters.compilations.spend(compilation)

    def _report_not_finite(self) -> None:
        for name, step in list(self._logged_values.not_finite.items())[self._written_names :]:
            self._write("not_finite", name=name, step=step)
        self._written_names = len(self._logged_values.not_finite)

    @hookimpl
    def polyxla_metrics_ready(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report what an evaluation compiled, and exclude it from the time of the steps."""
        if self._step_counters:
            self._report(self._step_counters.between_steps(step, self._replica.current_loader))
        # An evaluation has no steps; its time would make them look slow.
        self._throughput.exclude()
        self._logged_values.check(step, metrics)
        if metrics:
            self._write("metrics", step=step, values=dict(metrics))
        self._report_not_finite()

    @hookimpl(trylast=True)
    def polyxla_epoch_finished(self) -> None:
        """Report what was compiled since the last step, by an exchange of metrics or a checkpoint."""
        self.finish_listeners()

    def finish_listeners(self) -> None:
        """Report what other listeners compiled, which would otherwise be taken for the next step's."""
        if self._step_counters:
            loader = self._replica.current_loader
            self._report(self._step_counters.between_steps(self._replica.steps, loader))

    @hookimpl
    def polyxla_replica_stopped(self, error: BaseException | None) -> None:
        """Print the summary, also after an error."""
        self._next_window()
        summary = self.summary()
        findings = self._step_counters.close() if self._step_counters else []
        if self._steps and self._prints_summary:
            say(str(summary))
        reason = f"{type(error).__name__}: {error}" if error else None
        self._write("end", summary=summary.as_json(), findings=findings, error=reason)
        if self._log:
            self._log.close()

    def summary(self) -> Summary:
        """Return the totals so far."""
        total = self._total
        step_s = statistics.median(self._step_times) if self._step_times else None
        summary = Summary(
            steps=self._steps,
            is_shared=self._is_shared,
            seconds=self._warm_up_s + total.seconds,
            unexpected=self._budget.spent,
            wait_share=total.wait_share,
            records_per_s=total.records_per_s(self._replica.data_world.world_size),
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
