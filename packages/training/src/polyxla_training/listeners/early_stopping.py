"""`EarlyStopping`, which ends a training that no longer improves, and the best value of a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyxla import UsageError, hookimpl
from polyxla_training.options import check_mode

if TYPE_CHECKING:
    from polyxla import Replica
    from polyxla_training.options import Fit


class BestValue:
    """Remembers the best value of one metric.

    Args:
        name: the metric's name.
        mode: ``min`` or ``max``: what is better.
        where: the option that names the metric, for errors.
        min_delta: smallest change that counts as an improvement.

    Attributes:
        name: the metric's name.
        mode: as given.
        best: the best value so far; None before the first.
        is_seen: whether the metric was logged, perhaps as NaN.

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
        # NaN compares false with everything, so it must not become the best value.
        if math.isnan(value):
            return False
        gain = math.inf if self.best is None else self.best - value
        # Anything is better than nothing, in either mode.
        is_better = (gain if self.mode == "min" or self.best is None else -gain) > self._min_delta
        if is_better:
            self.best = value
        return is_better

    def check(self, epoch: int, every_n_epochs: int) -> None:
        """Check that the metric was logged, once an epoch with a validation has ended.

        Raises:
            UsageError: it was not logged.
        """
        # Checked after an epoch only: a metric of a validation is not there before.
        if not self.is_seen and epoch % every_n_epochs == 0:
            raise UsageError(
                f"monitor={self.name!r} was not logged, by epoch {epoch}",
                where=self._where,
                fix=f"Log it: self.log({self.name!r}, ...) in validation_step, or with on_epoch=True.",
            )


class EarlyStopping:
    """Ends a training when a metric has not improved for some evaluations: ``Trainer(callbacks=[...])``.

    All replicas make the same decision, because metrics are means over all of them. A checkpoint holds the
    count, so a resumed training ends where it would have ended. NaN and infinity end it at once.

    Args:
        monitor: name of a metric: a value logged in ``validation_step``, or in training with
            ``on_epoch=True``.
        mode: ``min`` or ``max``: what is better.
        patience: number of evaluations without an improvement after which training ends.
        min_delta: smallest change that counts as an improvement.

    Attributes:
        best: the best value so far; None before the first.
        waited: number of evaluations since the best one.

    Raises:
        UsageError: `mode`, `patience` or `min_delta` is invalid; or, after the first epoch that is validated,
            the metric was not logged.
    """

    def __init__(self, monitor: str, mode: str = "min", patience: int = 3, min_delta: float = 0.0) -> None:
        where = "EarlyStopping"
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise UsageError(
                f"patience={patience!r} is not a positive integer", where=where, fix="Write patience=3."
            )
        self._monitor = BestValue(monitor, mode, where, min_delta)
        self._patience = patience
        self.waited = 0

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first."""
        return self._monitor.best

    @property
    def state_key(self) -> str:
        """Its name in checkpoints."""
        return f"EarlyStopping:{self._monitor.name}:{self._monitor.mode}"

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training continues from."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._monitor.best, self.waited = state["best"], state["waited"]
        self._monitor.is_seen = self.best is not None or self.waited > 0

    @hookimpl
    def polyxla_fit_started(self, replica: Replica, fit: Fit) -> None:
        """Start from the beginning, unless the training resumes."""
        self._fit = fit
        # Checked here, because the same object may be used in a second fit, which starts from the beginning.
        if replica.steps == 0:
            self._monitor.best, self.waited = None, 0
        elif self.waited >= self._patience:
            # The earlier run ended for this reason; one that resumes it must not train on.
            self._stop()

    @hookimpl
    def polyxla_metrics_ready(self, metrics: Mapping[str, float], hidden: Mapping[str, float]) -> None:
        """Count an evaluation, if it is one of this metric."""
        value = {**metrics, **hidden}.get(self._monitor.name)
        if value is None:
            return
        self.waited = 0 if self._monitor.improves(value) else self.waited + 1
        # A training does not recover from NaN or infinity, so more patience would only waste time.
        if not math.isfinite(value):
            self._fit.stop(f"EarlyStopping: {self._monitor.name} is {value}")
        elif self.waited >= self._patience:
            self._stop()

    def _stop(self) -> None:
        name, times = self._monitor.name, "evaluation" if self.waited == 1 else f"{self.waited} evaluations"
        self._fit.stop(f"EarlyStopping: {name} has not been better than {self.best:.6g} in the last {times}")

    @hookimpl
    def polyxla_epoch_finished(self, epoch: int) -> None:
        """Check that the metric is logged."""
        self._monitor.check(epoch, self._fit.options.val_every_n_epochs)
