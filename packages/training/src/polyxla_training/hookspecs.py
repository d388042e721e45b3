"""The hooks of a training, in the order they fire. Imports nothing heavy.

Plugins find them by the entry-point group ``polyxla.hookspecs``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from polyxla.plugin import hookspec

if TYPE_CHECKING:
    from polyxla import Replica
    from polyxla_training.options import Fit


@hookspec
def polyxla_listeners(replica: Replica, fit: Fit) -> Iterable[object] | None:
    """Return listeners to one `polyxla_training.Trainer.fit`: objects with hook implementations.

    Called once per fit in each replica, when its module is on the device. The listeners receive events until
    the replica stops. None: no listeners.

    A listener that holds a thread, a file or a signal handler is best returned by a generator: it is
    registered before the next is made, so that it learns that the replica stops if making that one fails.
    """


@hookspec
def polyxla_fit_started(replica: Replica, fit: Fit) -> None:
    """A training begins: all listeners are there, and have the states of the checkpoint that it resumes from.

    Called once per fit in each replica.

    Args:
        replica: the replica that trains.
        fit: the training.
    """


@hookspec
def polyxla_metrics_ready(
    replica: Replica, step: int, metrics: Mapping[str, float], hidden: Mapping[str, float]
) -> None:
    """Metrics of an epoch or a validation are computed over all replicas. Called in each replica.

    Args:
        replica: the replica that trains.
        step: number of updates so far.
        metrics: means over all replicas' records, by name; empty if all are hidden.
        hidden: those that were logged with ``logger=False``: to be monitored, and not shown.
    """


@hookspec
def polyxla_validation_finished(replica: Replica) -> None:
    """A validation within an epoch has ended; `polyxla_epoch_finished` follows one at the end of an epoch.

    Called in each replica, between two steps.

    Args:
        replica: the replica that trains.
    """


@hookspec
def polyxla_epoch_finished(replica: Replica, epoch: int) -> None:
    """An epoch has ended, and its validation too. Called once per epoch in each replica.

    Args:
        replica: the replica that trains.
        epoch: number of finished epochs.
    """


@hookspec
def polyxla_fit_finished(replica: Replica) -> None:
    """A training has made its last step, or was stopped; the module is still on the device.

    Called once per fit in each replica, but not after an error. If training has ended within an epoch, a last
    evaluation follows, whose metrics a run that resumes from here will not have seen.

    Args:
        replica: the replica that trains.
    """
