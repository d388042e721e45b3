"""`TrainerView`: what a LightningModule sees as ``self.trainer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from polyxla import Replica
    from polyxla_training.options import FitOptions


@runtime_checkable
class LoggerListener(Protocol):
    """The listener that has a logger; its attributes are those of the same names of `LoggerView`."""

    name: str

    @property
    def experiment(self) -> Any:
        """What the logger's library offers."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values of a step."""


class _Nothing:
    """Has every method, and none does anything."""

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


@dataclass
class TrainerView:
    """The progress of training, under Lightning's names. What keeps it, such as a callback, can be copied.

    Attributes:
        current_epoch: number of finished epochs.
        global_step: number of optimizer updates so far.
        max_epochs: number of passes over the training data.
        world_size: number of replicas.
        is_global_zero: whether this is ordinal 0.
        global_rank: the ordinal.
        local_rank: the local ordinal.
        node_rank: number of this host.
        num_nodes: number of hosts.
        max_steps: number of updates after which training ends; -1 for no limit.
        accumulate_grad_batches: number of batches whose gradients make one update.
        gradient_clip_val: the limit of the gradients' norm, or else of their elements; None for no limit.
        gradient_clip_algorithm: ``norm`` or ``value``; None without a limit.
        should_stop: set it to True to end training: with one replica after the current update and a
            validation, with several at the end of the epoch in which any of them has set it.
        estimated_stepping_batches: optimizer updates that training will make; inf if unknown.
        num_training_batches: batches of one epoch; inf if unknown.
        validated_batches: batches of this epoch before the last validation in it; 0 if there was none.
        fast_dev_run: the Trainer's option.
        callbacks: the Callback objects.
        optimizers: the optimizer, in a list; empty before ``configure_optimizers``.
        callback_metrics: the metrics so far, by name, as tensors on the host.
        model: the module.
        datamodule: the data module, if there is one.
        training: whether a training batch is being processed, or an epoch of them.
        validating: likewise a validation.
        testing: likewise a test.
        sanity_checking: False; there is no sanity check.
        predicting: likewise a prediction.
        logger: the first of `loggers`; None if there is none.
        loggers: those of a `fit`, once its optimizer is made.
        progress_bar_callback: None; ``self.print`` of a LightningModule prints plainly.
    """

    current_epoch: int
    global_step: int
    max_epochs: int
    world_size: int
    is_global_zero: bool
    global_rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    num_nodes: int = 1
    max_steps: int = -1
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    should_stop: bool = False
    estimated_stepping_batches: float = float("inf")
    num_training_batches: float = float("inf")
    validated_batches: int = 0
    fast_dev_run: bool | int = False
    callbacks: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    callback_metrics: dict[str, Any] = field(default_factory=dict)
    model: Any = None
    datamodule: Any = None
    training: bool = False
    validating: bool = False
    testing: bool = False
    sanity_checking: bool = False
    predicting: bool = False
    logger: LoggerView | None = None
    loggers: list[LoggerView] = field(default_factory=list)
    progress_bar_callback: None = None

    @classmethod
    def at_start(cls, replica: Replica, options: FitOptions, datamodule: Any = None) -> Self:
        """Return the view of a training that begins in `replica`."""
        world = replica.world
        limit = options.clip_value if options.clip_norm is None else options.clip_norm
        algorithm = "value" if options.clip_norm is None else "norm"
        return cls(
            current_epoch=0,
            global_step=0,
            max_epochs=options.max_epochs,
            world_size=world.world_size,
            is_global_zero=replica.is_first,
            global_rank=world.ordinal,
            local_rank=world.local_ordinal,
            node_rank=world.host_index,
            num_nodes=world.host_count,
            max_steps=-1 if options.max_steps is None else options.max_steps,
            accumulate_grad_batches=options.accumulate,
            fast_dev_run=options.fast_dev_run,
            gradient_clip_val=limit,
            gradient_clip_algorithm=None if limit is None else algorithm,
            datamodule=datamodule,
        )

    @contextmanager
    def evaluating(self, kind: str) -> Iterator[None]:
        """Set the flags of an evaluation for the block; `kind` is ``validation``, ``test`` or ``predict``."""
        before, self.training = self.training, False
        self.validating, self.testing, self.predicting = (
            kind == one for one in ("validation", "test", "predict")
        )
        yield
        self.training, self.validating, self.testing, self.predicting = before, False, False, False

    @property
    def lightning_module(self) -> Any:
        """The module."""
        return self.model

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError, so that hasattr() works.
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(one.name for one in fields(self))
        raise AttributeError(f"polyxla's Trainer has no {name!r} in self.trainer; it has {known}")
