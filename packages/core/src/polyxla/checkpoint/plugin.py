"""Brings checkpoints to a Trainer, by the hook that every listener comes by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyxla.hookspecs import hookimpl

if TYPE_CHECKING:
    from polyxla.fit import Fit
    from polyxla.replica import Replica


@hookimpl
def polyxla_listeners(replica: Replica, fit: Fit) -> list[object] | None:
    """Return what saves, where the Trainer was given a folder for it."""
    if fit.settings.checkpoint_dir is None:
        return None
    from polyxla.checkpoint.saver import Saver

    return [Saver(replica, fit, fit.settings.checkpoint_dir)]
