"""How far a training has come, how much of its data it reads, and when it validates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from polyxla import UsageError
from polyxla_training.options import FitOptions

Phase = Literal["", "training", "validation", "test", "predict"]


@dataclass
class Progress:
    """How far one replica has come. The loop writes it; `TrainerView` and checkpoints read it.

    It is plain data, because callbacks keep the view, and are copied and pickled with it.

    Attributes:
        epoch: number of finished epochs.
        step: number of optimizer updates so far.
        validated_batches: batches of this epoch before the last validation in it; 0 if there was none.
        batches_per_epoch: batches of this epoch; None if unknown.
        expected_steps: optimizer updates that training will make; inf if unknown.
        phase: what the module is used for at the moment; empty between epochs and outside of `fit`.
        means: the latest metrics: means over all replicas' records, by name.
        should_stop: whether this replica's module or a callback asks to end training.
        stopped: why training ends early; empty if it does not.
    """

    epoch: int = 0
    step: int = 0
    validated_batches: int = 0
    batches_per_epoch: int | None = None
    expected_steps: float = float("inf")
    phase: Phase = ""
    means: dict[str, float] = field(default_factory=dict)
    should_stop: bool = False
    stopped: str = ""


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the number of batches of a loader; None if it does not know."""
    try:
        # A DataLoader over an IterableDataset has __len__, and raises TypeError when it is called.
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def count_batches(length: int | None, options: FitOptions, option: str) -> int | None:
    """Return how many batches of an epoch are read; None for all of a loader without a length.

    Arguments and errors are those of `batch_limit`.
    """
    limit = batch_limit(length, options, option)
    if length is None or limit is None:
        return length if limit is None else limit
    return min(length, limit)


def batch_limit(length: int | None, options: FitOptions, option: str) -> int | None:
    """Return how many batches of an epoch an option allows; None for all.

    Args:
        length: number of the loader's batches; None if it is unknown.
        options: the Trainer's options.
        option: the limit's name, such as ``limit_val_batches``.

    Raises:
        UsageError: the limit is a fraction of an unknown number, or of too few batches.
    """
    limit: float | None = getattr(options, option)
    # An int is a number of batches and a float a fraction, as in Lightning: 1 is one batch, 1.0 all of them.
    if limit is None or isinstance(limit, int):
        return limit
    return _fraction(length, limit, option)


def _fraction(length: int | None, fraction: float, option: str) -> int:
    if length is None or (length and int(length * fraction) < 1):
        which = "a loader without a length" if length is None else f"{length} batches: less than one"
        raise UsageError(
            f"{option}={fraction!r} is a fraction of {which}",
            where="Trainer",
            fix=f"Write a number of batches, such as {option}=1.",
        )
    return int(length * fraction)


@dataclass(frozen=True)
class ValidationSchedule:
    """When a training is validated.

    Attributes:
        every_n_epochs: interval of the epochs that are validated.
        interval: number of batches between two validations within an epoch; None: after the epoch.
    """

    every_n_epochs: int = 1
    interval: int | None = None

    @classmethod
    def of(cls, options: FitOptions, batches: int | None) -> ValidationSchedule:
        """Return the schedule for epochs of this number of batches; None if it is unknown.

        Raises:
            UsageError: an epoch has fewer batches than the interval, or the interval is a fraction of an
                unknown number.
        """
        given = options.val_check_interval
        if given is None:
            return cls(options.val_every_n_epochs)
        if not isinstance(given, int):
            # Between two updates, so that a checkpoint after the validation misses no gradients.
            whole = _fraction(batches, given, "val_check_interval")
            interval = max(whole - whole % options.accumulate, options.accumulate)
            return cls(options.val_every_n_epochs, interval if given < 1 else None)
        if batches is not None and given > batches:
            raise UsageError(
                f"val_check_interval={given} is more than the {batches} batches of an epoch",
                where="Trainer",
                fix="Leave it out to validate after each epoch; see val_every_n_epochs= too.",
            )
        return cls(options.val_every_n_epochs, given)

    def is_due(self, epoch: int, batches: int, *, is_end: bool) -> bool:
        """Return whether to validate now.

        Args:
            epoch: number of finished epochs.
            batches: number of this epoch's batches so far.
            is_end: whether the epoch has no further batches.
        """
        # `epoch` counts finished epochs, so the one that runs is the next.
        if (epoch + 1) % self.every_n_epochs:
            return False
        # With an interval, an epoch's end is validated only if the interval ends there too.
        return is_end if self.interval is None else batches % self.interval == 0
