"""The whole state of a training: what a checkpoint holds, and how a run goes on from one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyxla.console import say
from polyxla.errors import UsageError
from polyxla.replica import random_state
from polyxla.replica.replica import Replica
from polyxla_training.checkpoint import CheckpointError, CheckpointFolder, check_state, load

if TYPE_CHECKING:
    from polyxla_training.loop import Loop

FORMAT = 1
"""Of `Standing.state_dict`; a checkpoint of another is refused."""


class Standing:
    """Where one replica's training stands, all of it: parameters, optimizer, schedules, data, random numbers.

    Args:
        replica: whose training.
        loop: the training; its optimizer is configured.
    """

    def __init__(self, replica: Replica, loop: Loop) -> None:
        self._replica = replica
        self._loop = loop

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the rest of the training depends on, the same in every replica.

        A collective, between two steps. Tensors are those on the device: save or copy them before the next
        step.
        """
        loop = self._loop
        own = {"rng": self._replica.rng_state(), "meter": loop.meter.state_dict()}
        return {
            "format": FORMAT,
            "world_size": self._replica.world_size,
            "precision": self._replica.precision.name,
            "epoch": loop.state.current_epoch,
            "step": self._replica.steps,
            "seed": loop.how.seed,
            "data": loop.loader.state_dict(),
            "module": dict(loop.module.state_dict()),
            "optimizer": loop.optimizer.state_dict(),
            "schedules": loop.schedulers.state_dict(),
            "replicas": self._replica.all_gather(own),
        }

    def resume(self) -> None:
        """Go on from the checkpoint that was asked for, if any. A collective.

        Raises:
            UsageError: there is none where a path was given, or it does not fit.
        """
        how = self._loop.how
        if how.resume is None:
            return
        path, state = self._found(how.resume, how.checkpoint_dir)
        if path is None:
            return
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise UsageError(
                f"{path} is no checkpoint of a Trainer",
                where=f"resume={how.resume!r}",
                fix="Name one that a Trainer saved; polyxla_training.load reads any other.",
            )
        self.load_state_dict(state, str(path))
        if self._replica.is_first:
            say(f"resumed from {path}: epoch {state['epoch']}, step {state['step']}")

    def _found(self, resume: str, folder: str | None) -> tuple[Path | None, Any]:
        """Return the path that ordinal 0 chose, and what every replica reads from it."""
        path, state = None, None
        if resume != "auto":
            path = Path(resume)
        elif self._replica.is_first and folder is not None:
            entry, state = CheckpointFolder(folder).load_latest() or (None, None)
            path = entry.path if entry else None
        path = self._replica.broadcast(path)
        return path, load(path) if path is not None and state is None else state

    def load_state_dict(self, state: Mapping[str, Any], where: str) -> None:
        """Go on from `state_dict`, also of another number of replicas.

        Args:
            state: on the host.
            where: what it was read from, for errors.

        Raises:
            UsageError: the module, its optimizer or its schedules are others.
        """
        loop = self._loop
        check_state(loop.module.state_dict(), state["module"], where=where)
        loop.module.load_state_dict(state["module"])
        try:
            loop.optimizer.load_state_dict(state["optimizer"])
            loop.schedulers.load_state_dict(state["schedules"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"the optimizer or its schedules do not fit: {error}",
                where=where,
                fix="Let configure_optimizers return what it returned when the checkpoint was written.",
            ) from error
        now = self._replica.precision.name
        if now != state["precision"] and self._replica.is_first:
            say(f"{where} was saved with precision {state['precision']}, and training goes on with {now}")
        loop.state.current_epoch = state["epoch"]
        loop.state.global_step = self._replica.steps = state["step"]
        loop.loader.load_state_dict(state["data"])
        self._take_own(state)

    def _take_own(self, state: Mapping[str, Any]) -> None:
        ordinal, saved = self._replica.ordinal, state["replicas"]
        if len(saved) == self._replica.world_size:
            self._replica.restore_rng(saved[ordinal]["rng"])
            self._loop.meter.load_state_dict(saved[ordinal]["meter"])
            return
        # Streams that nobody has drawn from: of those that were saved, there are not as many as replicas.
        self._replica.seed_everything(random_state.derive(state["seed"] or 0, "resumed", state["step"]))
        if ordinal == 0:
            self._loop.meter.load_state_dict(_added(one["meter"] for one in saved))


def _added(meters: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    totals: dict[str, tuple[float, float]] = {}
    for name, (total, weight) in itertools.chain.from_iterable(one.items() for one in meters):
        before = totals.get(name, (0.0, 0.0))
        totals[name] = (before[0] + total, before[1] + weight)
    return totals
