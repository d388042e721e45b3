"""What listens to a Trainer unless somebody replaces it, and ``polyxla report``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from polyxla.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer

    from polyxla.fit import Fit
    from polyxla.observe.runlog import RunLog
    from polyxla.replica import Replica


@hookimpl
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add the command; what it needs is imported when it runs."""
    from polyxla.observe.command import report

    app.command()(report)


@hookimpl
def polyxla_listeners(replica: Replica, fit: Fit) -> list[object] | None:
    """Give ordinal 0 its progress, its files and an observer."""
    return list(_listeners(replica, fit)) if replica.is_first else None


def _listeners(replica: Replica, fit: Fit) -> Iterator[object]:
    from polyxla.observe.observer import Observer
    from polyxla.observe.readings import Readings

    how, readings = fit.settings, Readings(replica.gauge())
    if how.progress:
        from polyxla.progress import Progress

        yield Progress(how, fit.steps_per_epoch, readings)
    if how.log_dir is not None:
        from polyxla.tensorboard import TensorBoard

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


def _run_log(replica: Replica, fit: Fit, folder: str) -> RunLog:
    from polyxla.observe.runlog import RunLog

    log = RunLog(folder)
    log.start(replica, module=type(fit.module).__name__, settings=asdict(fit.settings))
    return log
