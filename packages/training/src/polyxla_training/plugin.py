"""The commands of polyxla-training, and the listeners of every training. Imports nothing heavy."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polyxla import UsageError, hookimpl
from polyxla.plugin import constants, say, say_once, snapshot
from polyxla_training import env
from polyxla_training.options import FILE_LOGGERS
from polyxla_training.storage import is_url

if TYPE_CHECKING:
    import torch
    import typer

    from polyxla import Replica
    from polyxla.plugin import Sharding
    from polyxla_training.listeners.loggers import Logger
    from polyxla_training.observe.run_log import RunLog
    from polyxla_training.observe.step_counters import LoggedValues
    from polyxla_training.options import Fit, FitOptions


Made = TypeVar("Made")


@hookimpl
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add the commands; each imports what it needs when it runs."""
    from polyxla_training.commands import check_replicas, consolidate, report

    app.command()(report)
    app.command()(consolidate)
    app.command()(check_replicas)


@hookimpl
def polyxla_variables() -> frozenset[str]:
    """Name this package's variables."""
    return constants(env)


@hookimpl
def polyxla_replica_started(replica: Replica) -> None:
    """Watch the replica's loop, unless POLYXLA_OBSERVE is off."""
    if _observes(snapshot()):
        from polyxla_training.observe.own_loop.loop_watch import LoopWatch

        replica.add_listener(LoopWatch(replica))


def _observes(environ: Mapping[str, str]) -> bool:
    text = environ.get(env.POLYXLA_OBSERVE) or "on"
    if text not in ("on", "off"):
        raise UsageError(
            f"{env.POLYXLA_OBSERVE}={text} is neither on nor off",
            where="the environment",
            fix=f"Write {env.POLYXLA_OBSERVE}=off, or unset it.",
        )
    return text == "on"


@hookimpl
def polyxla_shard_module(
    replica: Replica,
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: Mapping[str, int],
    take_first: bool,
) -> Sharding | None:
    """Divide the module by torch's own libraries."""
    from polyxla_training.sharding.sharded_module import shard_module

    return shard_module(replica, module, optimizers, mesh, take_first)


@hookimpl
def polyxla_launch_finished(summaries: Mapping[int, Sequence[Any]]) -> None:
    """Print silent faults of several replicas: different parameters, undivided records."""
    from polyxla_training.observe.own_loop.loop_summary import LoopSummary, problems

    replicas = {
        ordinal: summary
        for ordinal, found in summaries.items()
        for summary in found
        if isinstance(summary, LoopSummary)
    }
    # A single replica has nothing to be compared with.
    if len(replicas) > 1:
        for problem in problems(replicas):
            say(problem)


@hookimpl
def polyxla_listeners(replica: Replica, fit: Fit) -> Iterator[object]:
    """Add checkpoints in every replica; progress, log files, observer and profile on ordinal 0."""
    yield from _for_every_replica(replica, fit)
    if replica.is_first:
        yield from _for_first_replica(replica, fit)


def _for_every_replica(replica: Replica, fit: Fit) -> Iterator[object]:
    if fit.options.checkpoint_dir is not None:
        from polyxla_training.listeners.checkpointing import CheckpointListener

        yield CheckpointListener(replica, fit, fit.options.checkpoint_dir)


def _for_first_replica(replica: Replica, fit: Fit) -> Iterator[object]:
    from polyxla_training.observe.observer import AfterListeners, Observer
    from polyxla_training.observe.step_counters import LoggedValues

    options, logged_values = fit.options, LoggedValues(replica.counters(), fit.log_every_n_steps)
    directory: str | Path | None = options.log_dir
    if directory is not None and is_url(directory):
        from polyxla_training.listeners.log_upload import LogUploadListener

        upload = LogUploadListener(directory)
        directory = upload.path
        # First, and so called last when the replica stops: the other listeners have closed their files by
        # then.
        yield upload
    if options.progress and options.summary:
        from polyxla_training.listeners.progress import print_layers

        print_layers(fit.module, options.summary)
    if options.progress:
        from polyxla_training.listeners.progress import ProgressListener

        yield ProgressListener(options.max_epochs, fit.steps_per_epoch, logged_values, fit.optimizer)
    yield from _loggers(fit, directory, logged_values)
    observer = Observer(
        replica,
        log=_in_log_dir(options, partial(_run_log, replica, fit, directory)) if directory else None,
        logged_values=logged_values,
        module=fit.module,
        optimizer=fit.optimizer,
        compile_budget=options.compile_budget,
        on_budget=options.on_budget,
        prints_summary=options.progress,
    )
    yield observer
    # Checkpoints and the agreement on a stop are collectives, which compile programs of their own between
    # steps.
    if options.checkpoint_dir is not None and replica.world_size > 1:
        yield AfterListeners(observer)
    if options.profile_steps is not None:
        from polyxla_training.listeners.profiling import ProfileListener

        yield ProfileListener(replica, options.profile_steps, str(directory or "runs"))


def _loggers(fit: Fit, directory: str | Path | None, logged_values: LoggedValues) -> Iterator[object]:
    from polyxla_training.listeners.loggers import ScalarListener

    arguments = fit.options.logger_arguments
    if fit.options.log_dir is not None:
        view = f"; view it with: tensorboard --logdir {fit.options.log_dir}"
        say(f"logging to {fit.options.log_dir}{view if 'tensorboard' in arguments else ''}")
    for name, given in arguments.items():
        make = partial(_logger, name, given, fit, directory)
        logger = _in_log_dir(fit.options, make) if name in FILE_LOGGERS else make()
        if logger is not None:
            yield ScalarListener(logger, logged_values, name)


def _in_log_dir(options: FitOptions, make: Callable[[], Made]) -> Made | None:
    """Return what `make` opens in the directory of the logs; None, after a line, if the disk is full."""
    try:
        return make()
    except OSError as error:
        # A full disk may be no fault of the script, and logs are not worth a training; other errors are.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise UsageError(
                f"{options.log_dir!r} cannot be written: {error}",
                where="Trainer(log_dir=...)",
                fix="Name a directory that this process may write, or None.",
            ) from error
        say_once(f"{options.log_dir} is not written, and training goes on: {os.strerror(error.errno)}")
        return None


def _logger(name: str, given: Mapping[str, Any], fit: Fit, directory: str | Path | None) -> Logger:
    from polyxla_training.listeners.loggers import CsvLogger, MlflowLogger, TensorBoardLogger, WandbLogger
    from polyxla_training.observe.run_log import hyper_parameters

    log_dir = None if directory is None else str(directory)
    # The options have refused TensorBoard and CSV without a directory.
    if name == "tensorboard":
        return TensorBoardLogger(str(log_dir), **given)
    if name == "csv":
        return CsvLogger(str(log_dir), **given)
    settings = {**_settings(fit.options), **hyper_parameters(fit.module)}
    if name == "wandb":
        return WandbLogger(log_dir, settings, **given)
    return MlflowLogger(settings, **given)


def _settings(options: FitOptions) -> dict[str, Any]:
    """Return the options, as JSON has them."""
    values = {option.name: getattr(options, option.name) for option in fields(options)}
    # Callbacks are objects, so only the names of their classes are recorded.
    values["callbacks"] = [type(callback).__name__ for callback in options.callbacks]
    # Arguments of loggers may hold keys to their services.
    values["loggers"] = list(options.logger_arguments)
    return {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()
    }


def _run_log(replica: Replica, fit: Fit, directory: str | Path) -> RunLog:
    from polyxla_training.observe.run_log import RunLog, hyper_parameters

    log = RunLog(directory)
    log.start(
        replica,
        module=type(fit.module).__name__,
        settings=_settings(fit.options),
        hyper_parameters=hyper_parameters(fit.module),
    )
    return log
