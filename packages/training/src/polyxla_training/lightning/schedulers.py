"""The optimizer and learning-rate schedules that ``configure_optimizers`` returns. Heavy: imports torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from polyxla import UsageError

KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "reduce_on_plateau", "name")
"""Keys of a schedule's dict. Nothing here reads ``name``, which only Lightning's LearningRateMonitor does."""
INTERVALS = ("epoch", "step")


class Schedulers:
    """The learning-rate schedules that ``configure_optimizers`` returned.

    Args:
        configs: the schedules, or a dict with the schedule and `KEYS` for each.
        advance: called in place of each schedule's ``step``, with the schedule and the monitored metric or
            None: the module's ``lr_scheduler_step``.

    Raises:
        UsageError: a dict has a key or value that would be ignored.
    """

    def __init__(
        self, configs: Iterable[Any], advance: Callable[[Any, float | None], None] | None = None
    ) -> None:
        self.configs = [
            # A bare schedule means: step it after each epoch.
            config if isinstance(config, Mapping) else {"scheduler": config}
            for config in configs
        ]
        for config in self.configs:
            _check(config)
        self._advance = advance or _step
        self._steps = self._epochs = 0

    def step_finished(self) -> None:
        """Advance the schedules that count steps."""
        self._steps += 1
        for config in self._due("step", self._steps):
            self._advance(config["scheduler"], None)

    def epoch_finished(self) -> None:
        """Advance the schedules that count epochs, except those that wait for `metrics_ready`."""
        self._epochs += 1
        for config in self._due("epoch", self._epochs):
            if not _needs_metric(config):
                self._advance(config["scheduler"], None)

    def metrics_ready(self, metrics: Mapping[str, float]) -> None:
        """Advance the schedules, such as ReduceLROnPlateau, that depend on a metric of the epoch.

        Raises:
            UsageError: the metric was not logged.
        """
        for config in self._due("epoch", self._epochs):
            if not _needs_metric(config):
                continue
            monitor = config.get("monitor")
            if isinstance(monitor, str) and monitor in metrics:
                self._advance(config["scheduler"], metrics[monitor])
            # Lightning's key: a schedule that is not strict skips epochs without its metric.
            elif config.get("strict", True):
                raise UsageError(
                    f"{type(config['scheduler']).__name__} monitors {monitor!r}, which was not logged "
                    f"(logged: {sorted(metrics)})",
                    where="configure_optimizers",
                    fix="Name a logged metric: {'scheduler': ..., 'monitor': 'val_loss'}.",
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedules, as `polyxla_training.save` takes it."""
        # The counts are saved too: a schedule with a frequency depends on how many steps came before.
        states = [config["scheduler"].state_dict() for config in self.configs]
        return {"steps": self._steps, "epochs": self._epochs, "schedulers": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._steps, self._epochs = state["steps"], state["epochs"]
        for config, saved in zip(self.configs, state["schedulers"], strict=True):
            config["scheduler"].load_state_dict(saved)

    def _due(self, interval: str, count: int) -> list[Mapping[str, Any]]:
        return [
            config
            for config in self.configs
            if config.get("interval", "epoch") == interval and count % config.get("frequency", 1) == 0
        ]


def _step(scheduler: Any, metric: float | None) -> None:
    if metric is None:
        scheduler.step()
    else:
        scheduler.step(metric)


def _needs_metric(config: Mapping[str, Any]) -> bool:
    return config.get("reduce_on_plateau", isinstance(config["scheduler"], ReduceLROnPlateau)) is True


def _check(config: Mapping[str, Any]) -> None:
    # A misspelt key would be ignored, and the learning rate would be another one than intended.
    wrong = [key for key in config if key not in KEYS]
    if wrong or "scheduler" not in config:
        raise UsageError(
            f"a learning-rate schedule has the key {wrong[0]!r}"
            if wrong
            else f"{config!r} has no 'scheduler'",
            where="configure_optimizers",
            fix=f"Use the keys {', '.join(KEYS)}.",
        )
    interval = config.get("interval", "epoch")
    if interval not in INTERVALS:
        raise UsageError(
            f"the interval of a learning-rate schedule is {interval!r}",
            where="configure_optimizers",
            fix="Write 'interval': 'step' or 'epoch'.",
        )
    # Refused instead of slow: each step would wait for the device, and none of the speed would be left.
    if interval == "step" and _needs_metric(config):
        raise UsageError(
            f"{type(config['scheduler']).__name__} would read its metric from the device at every step",
            where="configure_optimizers",
            fix="Write 'interval': 'epoch'.",
        )


def configure_optimizers(
    module: Any, advance: Callable[[Any, float | None], None] | None = None
) -> tuple[torch.optim.Optimizer, Schedulers]:
    """Call ``configure_optimizers`` and read its answer in any of the forms Lightning allows.

    Args:
        module: the module.
        advance: as for `Schedulers`.

    Raises:
        UsageError: it returned no optimizer, or several, or one whose step needs a closure.
    """
    answer = module.configure_optimizers()
    optimizers, schedules = _unpack(answer)
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        raise UsageError(
            f"configure_optimizers returned {len(optimizers)} optimizers: {answer!r}",
            where=f"{type(module).__name__}.configure_optimizers",
            fix="Return one torch optimizer; for several, write the loop with polyxla.launch.",
        )
    name = type(optimizers[0]).__name__
    # LBFGS and similar optimizers call the closure several times in a step, each time with other parameters.
    closure = inspect.signature(optimizers[0].step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{name} computes the loss several times in one step, and the Trainer's update computes it once",
            where=f"{type(module).__name__}.configure_optimizers",
            fix=f"Use another optimizer, or write the loop with polyxla.launch: {name}.step(closure), whose "
            "closure averages the gradients with replica.all_reduce.",
        )
    return optimizers[0], Schedulers(schedules, advance)


def _unpack(answer: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedules in what ``configure_optimizers`` returned."""
    match answer:
        case None:
            return [], []
        case (Mapping() as config) | [Mapping() as config]:
            return [config.get("optimizer")], _unpack_schedule(config)
        case [list() as optimizers, list() as schedules]:
            return optimizers, schedules
        case [list() as optimizers, schedule]:
            return optimizers, [schedule]
        case list() | tuple():
            return list(answer), []
        case _:
            return [answer], []


def _unpack_schedule(config: Mapping[str, Any]) -> list[Any]:
    match config.get("lr_scheduler"):
        case None:
            return []
        case Mapping() as schedule:
            return [schedule]
        case scheduler:
            return [{"scheduler": scheduler, "monitor": config.get("monitor")}]
