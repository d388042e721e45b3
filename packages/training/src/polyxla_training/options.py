"""The options of a Trainer, and `Fit`, which its listeners receive. Light: imports no torch.

An option is a field: its name, type, default and description are here, and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any

from polyxla import UsageError
from polyxla.plugin import StartMethod
from polyxla_training.sharding.mesh_shape import DDP, DIMENSIONS, read_strategy
from polyxla_training.storage import check_location

if TYPE_CHECKING:
    import torch

    from polyxla.plugin import Precision

STRATEGIES = ("auto", "debug")
LIGHTNINGS_DEBUG = ("tpu_spawn_debug", "xla_debug")
"""Lightning's names of its strategies with torch_xla's report, in two versions: they mean ``debug``."""
LOG_EVERY_N_STEPS, LEAST_READS = 50, 10
"""Default interval of reads, and how many a shorter training should have."""
LOGGERS = ("tensorboard", "csv", "wandb", "mlflow")
FILE_LOGGERS = ("tensorboard", "csv")
BATCH_LIMITS = tuple(f"limit_{kind}_batches" for kind in ("train", "val", "test", "predict"))
NOT_IN_FAST_DEV_RUN: Mapping[str, Any] = {
    "max_epochs": 1,
    "max_steps": None,
    "log_dir": None,
    "loggers": None,
    "val_check_interval": None,
    "val_every_n_epochs": 1,
    "callbacks": (),
    "monitor": None,
    "checkpoint_dir": None,
    "save_every_n_steps": None,
    "keep": 2,
    "resume": None,
    "profile_steps": None,
}
"""The options that `fast_dev_run` replaces, beside the limits."""
_OF_CHECKPOINTS: Mapping[str, str] = {
    "monitor": "chooses the best checkpoint",
    "save_every_n_steps": "is the interval of checkpoints",
    "keep": "is the number of checkpoints to keep",
}
"""The options that mean nothing without a directory of checkpoints."""


@dataclass(frozen=True, eq=False)
class LaunchOptions:
    """The options that `polyxla.launch` takes.

    Attributes:
        accelerator: ``"auto"``, or the required kind of device (``"cpu"``, ``"tpu"``).
        devices: ``"auto"``, a count (``8`` or ``"8"``), or indices (``[5]`` is the device with index 5).
        precision: the name of a precision policy, or the policy itself.
        runtime: the name of a runtime; default: chosen from the environment.
        start_method: as in `polyxla.launch`.
    """

    accelerator: str = "auto"
    devices: int | str | Sequence[int] = "auto"
    precision: str | int | Precision | None = None
    _: KW_ONLY
    runtime: str | None = None
    start_method: StartMethod = "auto"


@dataclass(frozen=True, eq=False)
class FitOptions:
    """The options that travel to the replicas; listeners receive them in `Fit`.

    Attributes:
        strategy: ``"auto"``; how the replicas divide the module, such as ``"fsdp"`` or the mesh
            ``{"fsdp": 2, "tp-plan": 2}``, as in docs/sharding.md; or ``"debug"`` (Lightning's
            ``"xla_debug"``) to print the runtime's own report after training.
        max_epochs: number of passes over the training data.
        max_steps: number of optimizer updates after which training ends, even within an epoch.
        log_dir: directory of the TensorBoard files and the run log, or its URL in an object store. ``"auto"``
            makes a new directory under ``runs`` if TensorBoard is installed; None writes no files.
        loggers: what writes the logged values: names from ``"tensorboard"``, ``"csv"``, ``"wandb"`` and
            ``"mlflow"``, or a mapping from them to the arguments of these libraries, such as
            ``{"wandb": {"project": "digits", "mode": "offline"}}``. Default: TensorBoard in `log_dir`.
        log_every_n_steps: interval at which logged tensors are read, which waits for the device. The first
            and the last step are always read. Default: 50, or a tenth of the steps of a shorter training.
        progress: show progress on standard error.
        summary: print a table of the module's layers with their parameters first, if `progress` is set: True
            for all layers of a small module and the top level of a large one, a number of levels to show.
        accumulate: number of batches whose gradients make one optimizer update. The last update of an epoch
            takes the batches that are left.
        clip_norm: maximum norm of all gradients together, after they are averaged over the replicas.
        clip_value: maximum absolute value of a gradient's element.
        seed: seed of every replica's random numbers and of the order of the records. Default: torch's
            current seed, and the order of seed 0.
        limit_train_batches: number of batches of an epoch that each replica trains on, or their fraction of
            the loader: ``100``, or ``0.1``. None for all.
        limit_val_batches: the same for a validation; 0 for no validation.
        limit_test_batches: the same for a test.
        limit_predict_batches: the same for a prediction.
        val_check_interval: number of batches after which to validate within an epoch, or their fraction of
            it, such as ``0.25``; a multiple of `accumulate`. None: after the epoch.
        val_every_n_epochs: interval of the epochs that are validated.
        fast_dev_run: True, or a number: train, validate and test on this number of batches (True: one) of one
            epoch, without log files, checkpoints and profiles.
        callbacks: objects with hook implementations (`polyxla.hookimpl`), such as
            `polyxla_training.EarlyStopping`, and Callback objects of Lightning. Each replica has a copy,
            except a single replica in this process. If they have ``state_dict`` and ``load_state_dict``,
            checkpoints hold their states.
        monitor: name of the metric by which the best checkpoint is kept, as ``step-...-best``.
        mode: ``"min"`` or ``"max"``: which value of `monitor` is the best.
        prefetch: how far ahead to copy batches, such as ``{"loader_prefetch_size": 4}``; see
            `Replica.loader`.
        checkpoint_dir: directory, or its URL in an object store, in which the whole state is saved, at the
            end of each epoch and on SIGTERM; None saves nothing.
        save_every_n_steps: interval of further checkpoints within an epoch.
        keep: number of checkpoints to keep; None keeps all.
        resume: path or URL of the checkpoint to resume from, or ``"auto"`` to resume from the newest intact
            checkpoint in `checkpoint_dir`, if there is one.
        profile_steps: first and last step that ordinal 0 profiles; the profile is written to `log_dir`.
        compile_budget: number of programs that may be compiled after the first two steps (three under
            torch.compile) and the first evaluation; None for no limit.
        on_budget: ``"warn"`` or ``"raise"`` when more are compiled.

    Raises:
        UsageError: an option has an invalid value.
    """

    strategy: str | Mapping[str, int] = "auto"
    max_epochs: int = 1
    _: KW_ONLY
    max_steps: int | None = None
    log_dir: str | None = "auto"
    loggers: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None
    log_every_n_steps: int | None = None
    progress: bool = True
    summary: bool | int = True
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    seed: int | None = None
    limit_train_batches: float | None = None
    limit_val_batches: float | None = None
    limit_test_batches: float | None = None
    limit_predict_batches: float | None = None
    val_check_interval: float | None = None
    val_every_n_epochs: int = 1
    fast_dev_run: bool | int = False
    callbacks: Sequence[object] = ()
    monitor: str | None = None
    mode: str = "min"
    prefetch: Mapping[str, int] | None = None
    checkpoint_dir: str | os.PathLike[str] | None = None
    save_every_n_steps: int | None = None
    keep: int | None = 2
    resume: str | os.PathLike[str] | None = None
    profile_steps: tuple[int, int] | None = None
    compile_budget: int | None = None
    on_budget: str = "warn"

    def __post_init__(self) -> None:
        mesh = read_strategy(self.strategy, "Trainer(strategy=...)")
        # The class is frozen, and the normalised value replaces what the user wrote.
        object.__setattr__(self, "strategy", mesh or _find_strategy(self.strategy))
        self._check_counts()
        for name in BATCH_LIMITS:
            _check_batches(name, getattr(self, name))
        self._check_interval()
        for name in ("checkpoint_dir", "log_dir", "resume"):
            if getattr(self, name) is not None:
                check_location(getattr(self, name), f"{name}=")
        for name in ("clip_norm", "clip_value"):
            _check_limit(name, getattr(self, name))
        if self.profile_steps is not None and not 1 <= self.profile_steps[0] <= self.profile_steps[1]:
            raise UsageError(
                f"profile_steps={self.profile_steps!r} is not a first and a last step",
                where="Trainer",
                fix="Write profile_steps=(10, 12).",
            )
        self._check_checkpoints()
        self._check_loggers()

    def _check_counts(self) -> None:
        for name in ("max_epochs", "accumulate", "val_every_n_epochs"):
            _check_count(name, getattr(self, name))
        for name in ("fast_dev_run", "summary"):
            if not isinstance(getattr(self, name), bool):
                _check_count(name, getattr(self, name))
        for name in ("max_steps", "log_every_n_steps", "save_every_n_steps", "keep"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))

        # 0 is a valid budget, so the check of counts does not fit.
        budget, prefetch = self.compile_budget, self.prefetch
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise UsageError(
                f"compile_budget={budget!r} is not a number of programs, 0 or more",
                where="Trainer",
                fix="Write compile_budget=0 to allow none after the first steps, or leave it out.",
            )
        if prefetch is not None and not (
            isinstance(prefetch, Mapping) and all(map(_is_count, prefetch.values()))
        ):
            raise UsageError(
                f"prefetch={prefetch!r} is not a dictionary of options with positive integers",
                where="Trainer",
                fix="Write prefetch={'loader_prefetch_size': 4}.",
            )

    def _check_loggers(self) -> None:
        known = f"Write one of {', '.join(LOGGERS)}, as in loggers=['csv']."
        if isinstance(self.loggers, str):
            raise UsageError(f"loggers={self.loggers!r} is not a list", where="Trainer", fix=known)
        for name in self.loggers or ():
            if name not in LOGGERS:
                raise UsageError(f"there is no logger {name!r}", where="Trainer(loggers=...)", fix=known)
            if name in FILE_LOGGERS and self.log_dir is None:
                raise UsageError(
                    f"logger {name!r} writes files to log_dir, which is None",
                    where="Trainer(loggers=...)",
                    fix="Write log_dir='runs/mine', or leave log_dir out.",
                )

    @property
    def logger_arguments(self) -> Mapping[str, Mapping[str, Any]]:
        """The names of the loggers, each with the arguments for it."""
        if self.loggers is None:
            # TensorBoard is the default only where there is a directory to write to.
            return {"tensorboard": {}} if self.log_dir is not None else {}
        # A mapping has arguments for each logger, a list has none.
        return self.loggers if isinstance(self.loggers, Mapping) else {name: {} for name in self.loggers}

    def _check_checkpoints(self) -> None:
        check_mode(self.mode, "Trainer")
        # Without checkpoints these would be ignored silently.
        for name, meaning in _OF_CHECKPOINTS.items():
            value = getattr(self, name)
            if value != getattr(FitOptions, name) and self.checkpoint_dir is None:
                raise UsageError(
                    f"{name}={value!r} {meaning}, and checkpoint_dir is not set",
                    where="Trainer",
                    fix="Write checkpoint_dir='checkpoints' too.",
                )
        if self.resume == "auto" and self.checkpoint_dir is None:
            raise UsageError(
                "resume='auto' resumes from the newest checkpoint in checkpoint_dir, which is not set",
                where="Trainer",
                fix="Write checkpoint_dir='checkpoints' too, or the checkpoint's own path.",
            )

    def _check_interval(self) -> None:
        given: Any = self.val_check_interval
        _check_batches("val_check_interval", given)
        # A validation between the batches of one update would be followed by a checkpoint without their
        # gradients.
        if isinstance(given, int) and given % self.accumulate:
            raise UsageError(
                f"val_check_interval={given} is not a multiple of accumulate={self.accumulate}",
                where="Trainer",
                fix=f"Write val_check_interval={-(-given // self.accumulate) * self.accumulate}.",
            )

    @property
    def gradient_limit(self) -> tuple[float | None, str | None]:
        """The limit of the gradients, and what it limits: ``norm`` or ``value``; None without a limit."""
        if self.clip_norm is not None:
            return self.clip_norm, "norm"
        return self.clip_value, None if self.clip_value is None else "value"

    @property
    def mesh(self) -> Mapping[str, int] | None:
        """The mesh over which the module is divided; None if every replica has all of it."""
        return self.strategy if isinstance(self.strategy, Mapping) else None

    def expected_steps(self, steps_per_epoch: int | None) -> float:
        """Return how many updates a training makes; inf if unknown."""
        # Infinity keeps the comparisons simple: min() with a limit gives the limit.
        whole = float("inf") if steps_per_epoch is None else float(steps_per_epoch * self.max_epochs)
        return min(whole, float(self.max_steps or whole))

    def read_interval(self, steps: float) -> int:
        """Return `log_every_n_steps`, or its default for a training of `steps` updates; inf if unknown."""
        if self.log_every_n_steps is not None:
            return self.log_every_n_steps
        # A short training should show more than its first and last values.
        return int(max(1, min(LOG_EVERY_N_STEPS, steps // LEAST_READS)))


@dataclass(frozen=True, eq=False)
class TrainerOptions(FitOptions, LaunchOptions):
    """All options of a Trainer; those of `LaunchOptions` come first."""

    def launch_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `polyxla.launch`."""
        return {option.name: getattr(self, option.name) for option in fields(LaunchOptions)}

    def fit_options(self, log_dir: str | None) -> FitOptions:
        """Return what travels to the replicas.

        Args:
            log_dir: replaces the option, which may be ``"auto"``.
        """
        values = {option.name: getattr(self, option.name) for option in fields(FitOptions)}
        # Replaced here and not in the options themselves, so that the Trainer still shows what the user
        # wrote.
        if self.fast_dev_run:
            # The user's own limits give way too: a fast run must stay fast whatever the script asks for.
            limits = dict.fromkeys(BATCH_LIMITS, int(self.fast_dev_run))
            return FitOptions(**values | limits | dict(NOT_IN_FAST_DEV_RUN))
        return FitOptions(**values | {"log_dir": log_dir})


@dataclass(frozen=True)
class Fit:
    """One call of `polyxla_training.Trainer.fit`, as listeners in one replica receive it.

    Attributes:
        options: the Trainer's options; `log_dir` is a path or None.
        log_every_n_steps: interval at which logged tensors are read.
        module: the module in training, on the device.
        optimizer: updates its parameters; its ``param_groups`` have the learning rate.
        steps_per_epoch: optimizer updates in a whole epoch; None if the loader has no length.
        state_dict: returns the whole training state, as `polyxla_training.save` takes it. A collective; call
            it between steps. If a mesh divides the module, all replicas save it together.
        stop: takes a reason, which is printed, and ends training after the current step, or the epoch's end
            that it is called in. Every replica must call it at the same step.
    """

    options: FitOptions
    log_every_n_steps: int
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    steps_per_epoch: int | None
    state_dict: Callable[[], dict[str, Any]]
    stop: Callable[[str], None]


def _find_strategy(name: Any) -> str:
    if name in LIGHTNINGS_DEBUG:
        return "debug"
    # Lightning's name of what happens without a strategy: every replica has the whole module.
    if name == DDP:
        return "auto"
    if name not in STRATEGIES:
        raise UsageError(
            f"strategy={name!r} is not one of {', '.join((*STRATEGIES, *DIMENSIONS))}",
            where="Trainer",
            fix="Leave it out: replicas, and how they start, come from devices= and the runtime.",
        )
    return str(name)


def _is_count(value: Any) -> bool:
    # bool is an int to isinstance: max_epochs=True would mean one epoch.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_count(name: str, value: Any) -> None:
    if not _is_count(value):
        raise UsageError(
            f"{name}={value!r} is not a positive integer", where="Trainer", fix=f"Write {name}=1."
        )


def _check_batches(name: str, value: Any) -> None:
    # Only a validation may be left out; a training without batches is a mistake.
    least = 0 if name == "limit_val_batches" else 1
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or (is_number and (value >= least if isinstance(value, int) else 0 < value <= 1)):
        return
    raise UsageError(
        f"{name}={value!r} is neither a number of batches nor a fraction of them",
        where="Trainer",
        fix=f"Write {name}=10 for ten batches, or {name}=0.1 for a tenth of them.",
    )


def check_mode(mode: str, where: str) -> None:
    """Raise an error if `mode` is neither ``min`` nor ``max``.

    Raises:
        UsageError: it is neither.
    """
    if mode not in ("min", "max"):
        raise UsageError(f"mode={mode!r} is neither min nor max", where=where, fix="Write mode='min'.")


def _check_limit(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
        raise UsageError(
            f"{name}={value!r} is not a positive number",
            where="Trainer",
            fix=f"Write {name}=1.0, or leave it out.",
        )
