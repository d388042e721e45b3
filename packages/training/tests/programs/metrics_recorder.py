"""A plugin whose listener, in every replica, records the metrics and the finished epochs."""

from __future__ import annotations

from collections.abc import Mapping

from polyxla import Replica, hookimpl
from polyxla_training.options import Fit

received: dict[tuple[int, int], dict[str, float]] = {}
finished: list[tuple[int, int]] = []


class Recorder:
    @hookimpl
    def polyxla_metrics_ready(self, replica: Replica, step: int, metrics: Mapping[str, float]) -> None:
        received[replica.ordinal, step] = dict(metrics)

    @hookimpl
    def polyxla_epoch_finished(self, replica: Replica, epoch: int) -> None:
        finished.append((replica.ordinal, epoch))


@hookimpl
def polyxla_listeners(replica: Replica, fit: Fit) -> list[object]:
    assert fit.options.max_epochs == 2
    return [Recorder()]
