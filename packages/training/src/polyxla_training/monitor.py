"""The best value of a metric. Light: imports no torch."""

from __future__ import annotations

import math

from polyxla import UsageError

MODES = ("min", "max")


def check_mode(mode: str, where: str) -> None:
    """Raise an error if `mode` is neither ``min`` nor ``max``.

    Raises:
        UsageError: it is neither.
    """
    if mode not in MODES:
        raise UsageError(f"mode={mode!r} is neither min nor max", where=where, fix="Write mode='min'.")


class Monitor:
    """Remembers the best value of one metric.

    Args:
        name: the metric's name.
        mode: ``min`` or ``max``: what is better.
        where: who asks, for errors.
        min_delta: smallest change that counts as an improvement.

    Attributes:
        name: the metric's name.
        mode: as given.
        best: the best value so far; None before the first.
        is_seen: whether the metric was there, perhaps as NaN.

    Raises:
        UsageError: `mode` or `min_delta` is invalid.
    """

    def __init__(self, name: str, mode: str, where: str, min_delta: float = 0.0) -> None:
        check_mode(mode, where)
        if not (isinstance(min_delta, int | float) and min_delta >= 0):
            raise UsageError(f"min_delta={min_delta!r} is negative", where=where, fix="Write min_delta=0.0.")
        self.name, self.mode = name, mode
        self._where, self._min_delta = where, min_delta
        self.best: float | None = None
        self.is_seen = False

    def improves(self, value: float) -> bool:
        """Return whether `value` is the best so far, and remember it then; NaN never is."""
        self.is_seen = True
        if math.isnan(value):
            return False
        gain = math.inf if self.best is None else self.best - value
        is_better = (gain if self.mode == "min" or self.best is None else -gain) > self._min_delta
        if is_better:
            self.best = value
        return is_better

    def check(self, epoch: int, every_n_epochs: int) -> None:
        """See that the metric was there, once an epoch with a validation has ended.

        Raises:
            UsageError: it was not logged.
        """
        if not self.is_seen and epoch % every_n_epochs == 0:
            raise UsageError(
                f"monitor={self.name!r} was not logged, by epoch {epoch}",
                where=self._where,
                fix=f"Log it: self.log({self.name!r}, ...) in validation_step, or with on_epoch=True.",
            )
