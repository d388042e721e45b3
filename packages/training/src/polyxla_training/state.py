"""The whole state of a training: what a checkpoint holds, and how a run resumes from one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from polyxla import Replica, UsageError
from polyxla.plugin import Loader, random_state, say
from polyxla_training.checkpoint import CheckpointError, check_state
from polyxla_training.lightning.callbacks import states_of
from polyxla_training.lightning.schedulers import Schedulers
from polyxla_training.lightning.trainer_view import TrainerView
from polyxla_training.metrics import MetricAccumulator, Total, combine_totals
from polyxla_training.resume import load_same

if TYPE_CHECKING:
    from polyxla_training.checkpoint.shard_reader import ShardedCheckpoint

FORMAT = 4
"""Version of `TrainingState.state_dict`; checkpoints of other versions are refused."""


OWN_KEYS = ("epoch", "global_step", "state_dict")
"""What a LightningModule finds in its checkpoint, under Lightning's names; it may add other keys."""


@dataclass
class Checkpoint:
    """A state that was read from a file, on the host.

    Attributes:
        path: the file's path, for errors.
        state: as `TrainingState.state_dict` returned it.
        shards: where the tensors are of which `state` has only the shapes, on the meta device.
    """

    path: str
    state: dict[str, Any]
    shards: ShardedCheckpoint | None = None

    def pass_to(self, hook: Callable[[dict[str, Any]], None] | None) -> None:
        """Call a LightningModule's ``on_load_checkpoint``, which may change the parameters."""
        if hook is not None:
            state = self.state
            values = (state["epoch"], state["step"], dict(state["module"]))
            seen = dict(zip(OWN_KEYS, values, strict=True)) | state["module_extra"]
            hook(seen)
            state["module"] = seen["state_dict"]


def find_checkpoint(
    replica: Replica,
    source: str | os.PathLike[str],
    checkpoint_dir: str | os.PathLike[str] | None,
    *,
    in_shards: bool = False,
) -> Checkpoint | None:
    """Read the checkpoint to resume from; None if there is none yet. A collective.

    Args:
        replica: ordinal 0 chooses the file, and every replica reads it.
        source: path or URL of the checkpoint, or ``auto`` for the newest intact one in `checkpoint_dir`, if
            there is one.
        checkpoint_dir: directory of the checkpoints.
        in_shards: read the module's and the optimizer's tensors later, in shards, if they were saved so.

    Raises:
        UsageError: it does not exist, is not a Trainer's, or replicas found different ones.
    """
    source = os.fspath(source)
    found = load_same(replica, source, checkpoint_dir, in_shards=in_shards)
    if found is None:
        return None
    path, loaded = found
    state = loaded.state
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise UsageError(
            f"{path} is not a checkpoint of a Trainer of this version",
            where=f"resume={source!r}",
            fix="Name one that a Trainer saved; polyxla_training.load reads any other.",
        )
    return Checkpoint(str(path), dict(state), loaded.shards)


@dataclass(frozen=True)
class TrainingState:
    """Everything that the rest of one replica's training depends on.

    Attributes:
        replica: its update count and random numbers.
        module: its parameters and buffers, on the device.
        optimizer: as ``configure_optimizers`` returned it.
        schedulers: the learning-rate schedules.
        loader: the position in the training data.
        metrics: the means over the current epoch.
        view: the number of finished epochs.
        seed: the seed that the Trainer was given.
        on_save: the module's ``on_save_checkpoint``, if it has one.
        data_state: returns the data module's state.
        callbacks: the callbacks and listeners; of those that have states, ordinal 0's is saved.
        validation: the position in the validation data, whose order may differ in each epoch; None without.
        means: the latest metrics, which a schedule may monitor in an epoch without a validation.
    """

    replica: Replica
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedulers: Schedulers
    loader: Loader
    metrics: MetricAccumulator
    view: TrainerView
    seed: int | None
    on_save: Callable[[dict[str, Any]], None] | None = None
    data_state: Callable[[], dict[str, Any]] = dict
    callbacks: Sequence[Any] = ()
    validation: Loader | None = None
    means: dict[str, float] = field(default_factory=dict)

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
            "epoch": self.view.current_epoch,
            "validated_batches": self.view.validated_batches,
            "step": self.replica.steps,
            "seed": self.seed,
            "data": self.loader.state_dict(),
            "validation": None if self.validation is None else self.validation.state_dict(),
            "metrics": dict(self.means),
            "datamodule": self.data_state(),
            "module": module,
            "module_extra": module_extra,
            "optimizer": self.optimizer.state_dict(),
            "groups": self._groups(),
            "schedules": self.schedulers.state_dict(),
            "callbacks": states_of(self.callbacks),
            "replicas": self.replica.all_gather(own),
        }

    def _groups(self) -> list[list[str | None]]:
        """Return the names of the parameters in each of the optimizer's groups."""
        names = {id(one): name for name, one in self.module.named_parameters()}
        return [[names.get(id(one)) for one in group["params"]] for group in self.optimizer.param_groups]

    def _add_groups(self, groups: Sequence[Sequence[str | None]]) -> None:
        """Add the groups that a hook had added to the optimizer while it trained."""
        found: dict[str | None, torch.nn.Parameter] = dict(self.module.named_parameters())
        for names in groups[len(self.optimizer.param_groups) :]:
            if all(name in found for name in names):
                self.optimizer.add_param_group({"params": [found[name] for name in names]})

    def _module_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the module's tensors, and what its ``on_save_checkpoint`` adds."""
        module = dict(self.module.state_dict())
        if self.on_save is None:
            return module, {}
        values = (self.view.current_epoch, self.replica.steps, module)
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
        self.view.current_epoch = state["epoch"]
        self.view.validated_batches = state["validated_batches"]
        self.view.global_step = self.replica.steps = state["step"]
        self.means.update(state["metrics"])
        self.view.callback_metrics |= {name: torch.tensor(value) for name, value in self.means.items()}
        self.loader.load_state_dict(state["data"])
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
        errors = [one for one in self.replica.all_gather(error) if one is not None]
        if errors:
            raise error or errors[0]

    def resume_streams(self, checkpoint: Checkpoint) -> None:
        """Continue the random numbers and the epoch's means, just before the first step."""
        state = checkpoint.state
        ordinal, saved = self.replica.ordinal, state["replicas"]
        self.metrics.hidden.update(*(one["hidden"] for one in saved))
        if self.replica.is_first and (names := saved[0]["objects"]):
            say(f"metric objects begin anew, and their values of this epoch are those from here on: {names}")
        if len(saved) == self.replica.world_size:
            self.replica.restore_rng(saved[ordinal]["rng"])
            self.metrics.load_state_dict(saved[ordinal]["meter"])
            return
        # With another number of replicas, not each has a saved random state: all draw from new streams.
        self.replica.seed_everything(random_state.derive(state["seed"] or 0, "resumed", state["step"]))
        # Only one replica takes the totals of all, so that the epoch's mean counts them once.
        if ordinal == 0:
            self.metrics.load_state_dict(_combine_totals(one["meter"] for one in saved))


def _combine_totals(saved: Iterable[Mapping[str, Total]]) -> dict[str, Total]:
    parts: dict[str, list[Total]] = {}
    for name, total in itertools.chain.from_iterable(one.items() for one in saved):
        parts.setdefault(name, []).append(total)
    return {name: combine_totals(totals) for name, totals in parts.items()}
