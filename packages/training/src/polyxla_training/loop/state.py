"""The whole state of a training: what the loop works on, a checkpoint holds, and a run resumes from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyxla import Replica
from polyxla.plugin import Loader, random_state, say
from polyxla_training.checkpoint import CheckpointError, check_state
from polyxla_training.lightning.callbacks import states_of
from polyxla_training.lightning.schedulers import Schedulers
from polyxla_training.metrics import MetricAccumulator, Total, combine_totals
from polyxla_training.progress import Progress
from polyxla_training.resume import FORMAT, OWN_KEYS, Checkpoint


@dataclass(kw_only=True)
class TrainingState:
    """Everything that the rest of one replica's training depends on. The loop trains with it.

    Attributes:
        replica: its update count and random numbers.
        module: its parameters and buffers, on the device.
        optimizer: as ``configure_optimizers`` returned it.
        schedulers: the learning-rate schedules.
        loader: the position in the training data.
        validation: the position in the validation data, whose order may differ in each epoch; None without.
        metrics: what was logged in the current epoch.
        progress: the number of finished epochs, and the latest metrics, which a schedule may monitor.
        seed: the seed that the Trainer was given.
        callbacks: the callbacks and listeners; a checkpoint holds those of ordinal 0 that have states.
        on_save: the module's ``on_save_checkpoint``, if it has one.
        data_state: returns the data module's state.
    """

    replica: Replica
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedulers: Schedulers
    loader: Loader
    validation: Loader | None = None
    metrics: MetricAccumulator
    progress: Progress
    seed: int | None
    callbacks: list[Any] = field(default_factory=list)
    on_save: Callable[[dict[str, Any]], None] | None = None
    data_state: Callable[[], dict[str, Any]] = dict

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same in every replica but for the shards of divided tensors.

        A collective; call it between two steps. Its tensors are those on the device: save or copy them before
        the next step.
        """
        module, module_extra = self._module_state()
        own = {
            "rng": self.replica.rng_state(),
            "meter": self.metrics.state_dict(),
            "hidden": sorted(self.metrics.hidden),
            "objects": self.metrics.objects,
        }
        return {
            "format": FORMAT,
            "world_size": self.replica.world_size,
            "precision": self.replica.precision.name,
            "epoch": self.progress.epoch,
            "validated_batches": self.progress.validated_batches,
            "step": self.replica.steps,
            "seed": self.seed,
            "data": self.loader.state_dict(),
            "validation": None if self.validation is None else self.validation.state_dict(),
            "metrics": dict(self.progress.means),
            "datamodule": self.data_state(),
            "module": module,
            "module_extra": module_extra,
            "optimizer": self.optimizer.state_dict(),
            "groups": self._groups(),
            "schedules": self.schedulers.state_dict(),
            "callbacks": states_of(self.callbacks),
            # What differs between replicas; all else is the same in each of them, so ordinal 0's is saved.
            "replicas": self.replica.all_gather(own),
        }

    def _groups(self) -> list[list[str | None]]:
        """Return the names of the parameters in each of the optimizer's groups."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return [
            [names.get(id(parameter)) for parameter in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def _add_groups(self, groups: Sequence[Sequence[str | None]]) -> None:
        """Add the groups that a hook had added to the optimizer while it trained."""
        found: dict[str | None, torch.nn.Parameter] = dict(self.module.named_parameters())
        # Groups are only ever appended, so those that are missing come after those that configure_optimizers
        # makes.
        for names in groups[len(self.optimizer.param_groups) :]:
            if all(name in found for name in names):
                self.optimizer.add_param_group({"params": [found[name] for name in names]})

    def _module_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the module's tensors, and what its ``on_save_checkpoint`` adds."""
        module = dict(self.module.state_dict())
        if self.on_save is None:
            return module, {}
        values = (self.progress.epoch, self.replica.steps, module)
        seen: dict[str, Any] = dict(zip(OWN_KEYS, values, strict=True))
        self.on_save(seen)
        return seen["state_dict"], {key: value for key, value in seen.items() if key not in OWN_KEYS}

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; the number of replicas may differ. `resume_streams` comes after it.

        Raises:
            UsageError: the module, its optimizer or its schedules differ from those that were saved.
        """
        state, where = checkpoint.state, checkpoint.path
        # A LightningModule's choice: its on_save_checkpoint leaves tensors out.
        is_strict = getattr(self.module, "strict_loading", True) is not False
        if is_strict:
            check_state(self.module.state_dict(), state["module"], where=where)
        try:
            self._add_groups(state["groups"])
            if self.replica.sharding is None:
                self.module.load_state_dict(state["module"], strict=is_strict)
                self.optimizer.load_state_dict(state["optimizer"])
            else:
                self._divide(checkpoint, is_strict)
            self.schedulers.load_state_dict(state["schedules"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"the optimizer or its schedules do not fit: {error}",
                where=where,
                fix="Make configure_optimizers return what it returned when the checkpoint was written.",
            ) from error
        if state["step"]:
            # torch warns of a schedule that advances before its optimizer; the earlier run has stepped it.
            vars(self.optimizer)["_opt_called"] = True
        now = self.replica.precision.name
        if now != state["precision"] and self.replica.is_first:
            say(f"{where} was saved with precision {state['precision']}; training continues with {now}")
        self.progress.epoch, self.progress.step = state["epoch"], state["step"]
        self.progress.validated_batches = state["validated_batches"]
        self.progress.means |= state["metrics"]
        self.replica.steps = state["step"]
        self.loader.load_state_dict(state["data"])
        before, saved = self.loader.batches_before, state["data"]["batches"]
        if before != saved:
            # Batches have another size now. All that matters is whether the last one was validated.
            self.progress.validated_batches = before if state["validated_batches"] == saved else 0
        if self.validation is not None and state["validation"] is not None:
            self.validation.load_state_dict(state["validation"])
        if self.replica.is_first:
            say(f"resumed from {where}: epoch {state['epoch']}, step {state['step']}")

    def _divide(self, checkpoint: Checkpoint, is_strict: bool) -> None:
        """Load the tensors of this replica's shards. A collective: an error is raised in all replicas."""
        from polyxla_training.sharding.sharded_state import divide_into

        states, error = (checkpoint.state["module"], checkpoint.state["optimizer"]), None
        try:
            divide_into(self.module, self.optimizer, *states, is_strict, checkpoint.shards)
        except CheckpointError as found:
            error = found
        errors = [found for found in self.replica.all_gather(error) if found is not None]
        if errors:
            raise error or errors[0]

    def resume_streams(self, checkpoint: Checkpoint) -> None:
        """Continue the random numbers and the epoch's means, just before the first step."""
        state = checkpoint.state
        ordinal, saved = self.replica.ordinal, state["replicas"]
        self.metrics.hidden.update(*(replica["hidden"] for replica in saved))
        if self.replica.is_first and (names := saved[0]["objects"]):
            say(f"metric objects start from the beginning, and cover the rest of this epoch: {names}")
        if len(saved) == self.replica.world_size:
            self.replica.restore_rng(saved[ordinal]["rng"])
            self.metrics.load_state_dict(saved[ordinal]["meter"])
            return
        # With another number of replicas, not each has a saved random state: all draw from new streams.
        self.replica.seed_everything(random_state.derive(state["seed"] or 0, "resumed", state["step"]))
        # Only one replica takes the totals of all, so that the epoch's mean counts them once.
        if ordinal == 0:
            self.metrics.load_state_dict(_combine_totals(replica["meter"] for replica in saved))


def _combine_totals(saved: Iterable[Mapping[str, Total]]) -> dict[str, Total]:
    parts: dict[str, list[Total]] = {}
    for name, total in itertools.chain.from_iterable(totals.items() for totals in saved):
        parts.setdefault(name, []).append(total)
    return {name: combine_totals(totals) for name, totals in parts.items()}
