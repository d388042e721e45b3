"""polyxla-training's commands and the listeners of every training. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from polyxla.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer

    from polyxla.replica.replica import Replica
    from polyxla_training.fit import Fit
    from polyxla_training.observe.run_log import RunLog


@hookimpl
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add the commands; what they need is imported when they run."""
    from polyxla_training.commands import check_replicas, report

    app.command()(report)
    app.command()(check_replicas)


@hookimpl
def polyxla_listeners(replica: Replica, fit: Fit) -> list[object] | None:
    """Add what saves checkpoints in every replica; progress, log files, observer and profile on ordinal 0."""
    return [*_savers(replica, fit), *(_listeners(replica, fit) if replica.is_first else ())]


def _savers(replica: Replica, fit: Fit) -> Iterator[object]:
    if fit.settings.checkpoint_dir is not None:
        from polyxla_training.listeners.checkpointing import Saver

        yield Saver(replica, fit, fit.settings.checkpoint_dir)


def _listeners(replica: Replica, fit: Fit) -> Iterator[object]:
    from polyxla_training.observe.logged_values import Readings
    from polyxla_training.observe.observer import Observer

    how, readings = fit.settings, Readings(replica.counters())
    if how.progress:
        from polyxla_training.listeners.progress import Progress

        yield Progress(how, fit.steps_per_epoch, readings)
    if how.log_dir is not None:
        from polyxla_training.listeners.tensorboard import TensorBoard

        yield TensorBoard(how.log_dir, how.log_every_n_steps, readings)
    yield Observer(
        replica,
        every_n_steps=how.log_every_n_steps,
        log=_run_log(replica, fit, how.log_dir) if how.log_dir is not None else None,
        readings=readings,
        module=fit.module,
        compile_budget=how.compile_budget,
        on_budget=how.on_budget,
        shows=how.progress,
    )
    if how.profile_steps is not None:
        from polyxla_training.listeners.profiling import Profile

        yield Profile(how.profile_steps, how.log_dir or "runs")


def _run_log(replica: Replica, fit: Fit, folder: str) -> RunLog:
    from polyxla_training.observe.run_log import RunLog

    log = RunLog(folder)
    log.start(replica, module=type(fit.module).__name__, settings=asdict(fit.settings))
    return log
