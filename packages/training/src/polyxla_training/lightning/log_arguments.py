"""The arguments of ``self.log``: read as Lightning reads them, or refused. Heavy: imports torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from polyxla import UsageError

Reduction = Literal["mean", "min", "max", "sum"]
REDUCTIONS: Mapping[Any, Reduction] = {
    "mean": "mean",
    "avg": "mean",
    torch.mean: "mean",
    "min": "min",
    min: "min",
    torch.min: "min",
    "max": "max",
    max: "max",
    torch.max: "max",
    "sum": "sum",
    sum: "sum",
    torch.sum: "sum",
}
"""What ``reduce_fx`` may be. Source: Lightning 2.6, which accepts the same."""


def find_reduction(name: str, reduce_fx: Any, before: Reduction | None) -> Reduction:
    """Return the reduction that `reduce_fx` names.

    Args:
        name: the logged name.
        reduce_fx: as the user wrote it.
        before: the reduction of the name's values so far; None if there are none.

    Raises:
        UsageError: it names none, or another one than before.
    """
    key = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    kind = REDUCTIONS.get(key) if callable(key) or isinstance(key, str) else None
    if kind is None or before not in (None, kind):
        also = f" follows {before!r}" if kind else " is not supported"
        raise UsageError(
            f"reduce_fx={reduce_fx!r}{also}",
            where=f"self.log({name!r}, ...)",
            fix="Write one of mean, min, max and sum for each name, or log a torchmetrics object.",
        )
    return kind


def find_levels(
    name: str, is_training: bool, on_step: bool | None, on_epoch: bool | None
) -> tuple[bool, bool]:
    """Return whether a value is reported for its step, and whether for the epoch.

    Args:
        name: the logged name.
        is_training: whether it is logged in a training step.
        on_step: as the user wrote it; None: only in training.
        on_epoch: as the user wrote it; None: only outside training.

    Raises:
        UsageError: neither, or a value of an evaluation is to be reported for its step.
    """
    if on_step and not is_training:
        raise UsageError(
            "on_step=True outside a training step",
            where=f"self.log({name!r}, ...)",
            fix="Leave it out: the reduction over the epoch is reported.",
        )
    levels = (is_training if on_step is None else on_step, not is_training if on_epoch is None else on_epoch)
    if not any(levels):
        raise UsageError(
            "with neither on_step nor on_epoch the value would be dropped",
            where=f"self.log({name!r}, ...)",
            fix="Write on_epoch=True.",
        )
    return levels


def check_others(
    name: str, unknown: Iterable[str], known: Iterable[str], unsupported: Mapping[str, Any]
) -> None:
    """Refuse arguments that would be ignored.

    Args:
        name: the logged name.
        unknown: names of arguments that `log` does not have.
        known: names of those that it has.
        unsupported: arguments that must keep their defaults, which are false, with their values.

    Raises:
        UsageError: there is such an argument.
    """
    for option in unknown:
        near = difflib.get_close_matches(option, known, n=1)
        raise UsageError(
            f"self.log has no argument {option!r}",
            where=f"self.log({name!r}, ...)",
            fix=f"Write {near[0]}=." if near else "Leave it out.",
        )
    for option, value in unsupported.items():
        if value:
            raise UsageError(
                f"{option}={value!r} is not supported",
                where=f"self.log({name!r}, ...)",
                fix="Leave it out: values are detached, and combined over all replicas.",
            )
