"""`TrainerView`: what a LightningModule sees as ``self.trainer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

from polyxla_training.options import FitOptions
from polyxla_training.progress import Progress

if TYPE_CHECKING:
    from polyxla.plugin import World


@runtime_checkable
class LoggerListener(Protocol):
    """The listener that has a logger; its attributes are those of the same names of `LoggerView`."""

    name: str

    @property
    def experiment(self) -> Any:
        """The object of the logger's library."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values of a step."""


class _Nothing:
    """An object with every method, none of which does anything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


@dataclass
class LoggerView:
    """A logger of the Trainer, under Lightning's names.

    Attributes:
        name: such as ``tensorboard``.
        log_dir: the directory of the run; None without one.
        experiment: TensorBoard's ``SummaryWriter``, wandb's run, MLflow's client or our `CsvLogger`. In
            replicas other than ordinal 0, and in copies, an object whose methods do nothing.
        write: writes values of a step.
    """

    name: str
    log_dir: str | None = None
    experiment: Any = field(default_factory=_Nothing)
    write: Callable[[int, Mapping[str, float]], None] = _Nothing().write

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write values of a step."""
        self.write(step, metrics)

    def __reduce__(self) -> Any:
        # A copy of the module, as for a moving average, has no files.
        return LoggerView, (self.name, self.log_dir)


class TrainerView:
    """The training, under Lightning's names. What keeps it, such as a callback, can be copied.

    Args:
        world: the replica's numbers.
        options: the Trainer's options.
        progress: the loop's own, of which this shows the current values.
        datamodule: the data module, if there is one.

    Attributes:
        max_epochs: number of passes over the training data.
        max_steps: number of updates after which training ends; -1 for no limit.
        world_size: number of replicas.
        is_global_zero: whether this is ordinal 0.
        global_rank: the ordinal.
        local_rank: the local ordinal.
        node_rank: number of this host.
        num_nodes: number of hosts.
        accumulate_grad_batches: number of batches whose gradients make one update.
        gradient_clip_val: the limit of the gradients' norm, or else of their elements; None for no limit.
        gradient_clip_algorithm: ``norm`` or ``value``; None without a limit.
        fast_dev_run: the Trainer's option.
        callbacks: the Callback objects.
        optimizers: the optimizer, in a list; empty before ``configure_optimizers``.
        loggers: those of a `fit`, once its optimizer is made.
        model: the module.
        datamodule: as given.
        sanity_checking: False; there is no sanity check.
        progress_bar_callback: None; ``self.print`` of a LightningModule prints plainly.
    """

    def __init__(self, world: World, options: FitOptions, progress: Progress, datamodule: Any = None) -> None:
        self._progress = progress
        self.max_epochs = options.max_epochs
        self.max_steps = -1 if options.max_steps is None else options.max_steps
        self.world_size, self.global_rank = world.world_size, world.ordinal
        self.is_global_zero, self.local_rank = world.ordinal == 0, world.local_ordinal
        self.node_rank, self.num_nodes = world.host_index, world.host_count
        self.accumulate_grad_batches, self.fast_dev_run = options.accumulate, options.fast_dev_run
        self.gradient_clip_val, self.gradient_clip_algorithm = options.gradient_limit
        # Objects that the loop makes or completes later, and fills in here.
        self.callbacks: list[Any] = []
        self.optimizers: list[Any] = []
        self.loggers: list[LoggerView] = []
        self.model: Any = None
        self.datamodule = datamodule
        self.sanity_checking = False
        self.progress_bar_callback = None

    @property
    def current_epoch(self) -> int:
        """Number of finished epochs."""
        return self._progress.epoch

    @property
    def global_step(self) -> int:
        """Number of optimizer updates so far."""
        return self._progress.step

    @property
    def num_training_batches(self) -> float:
        """Batches of one epoch; inf if unknown."""
        batches = self._progress.batches_per_epoch
        return float("inf") if batches is None else batches

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer updates that training will make; inf if unknown."""
        return self._progress.expected_steps

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The metrics so far, by name, as tensors on the host."""
        # Imported here, because a script that imports the Trainer must not pay for torch before it trains.
        import torch

        return {name: torch.tensor(value) for name, value in self._progress.means.items()}

    @property
    def should_stop(self) -> bool:
        """Set it to True to end training.

        One replica ends after the current update and a validation, several at the end of the epoch in which
        any of them has set it.
        """
        return self._progress.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._progress.should_stop = value

    @property
    def training(self) -> bool:
        """Whether a training batch is being processed, or an epoch of them."""
        return self._progress.phase == "training"

    @property
    def validating(self) -> bool:
        """Whether a validation runs."""
        return self._progress.phase == "validation"

    @property
    def testing(self) -> bool:
        """Whether a test runs."""
        return self._progress.phase == "test"

    @property
    def predicting(self) -> bool:
        """Whether a prediction runs."""
        return self._progress.phase == "predict"

    @property
    def logger(self) -> LoggerView | None:
        """The first of `loggers`; None if there is none."""
        return next(iter(self.loggers), None)

    @property
    def lightning_module(self) -> Any:
        """The module."""
        return self.model

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError, so that hasattr() works. A view that is being copied has no attributes yet.
        if name.startswith("__") or name == "_progress":
            raise AttributeError(name)
        known = ", ".join(name for name in (*vars(type(self)), *vars(self)) if not name.startswith("_"))
        raise AttributeError(f"polyxla's Trainer has no {name!r} in self.trainer; it has {known}")
