"""Resuming: all replicas choose the same checkpoint, or all raise; `load_into` for users' own loops."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from polyxla import UsageError
from polyxla_training.checkpoint import CheckpointError, CheckpointFolder, check_state, fingerprint, load
from polyxla_training.checkpoint.atomic import is_sharded
from polyxla_training.long_work import run_while_others_wait
from polyxla_training.storage import Location, check_location, locate

if TYPE_CHECKING:
    import torch

    from polyxla.plugin import Collectives
    from polyxla_training.checkpoint.shard_reader import ShardedCheckpoint

MAX_NAMES = 3
"""Number of hosts that an error names for each outcome."""
UNREAD = ("module.", "optimizer.")
"""Beginnings of the names of those tensors that each replica reads its shards of, once it has divided the
module."""
FORMAT = 4
"""Version of `TrainingState.state_dict`; checkpoints of other versions are refused."""
OWN_KEYS = ("epoch", "global_step", "state_dict")
"""The keys of a LightningModule's checkpoint, under Lightning's names; the module may add others."""


@dataclass
class Checkpoint:
    """A state that was read from a file, on the host.

    Attributes:
        path: the file's path, for errors.
        state: as `TrainingState.state_dict` returned it.
        shards: reads the tensors that are on the meta device in `state`; None if there are none.
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


@dataclass(frozen=True)
class Loaded:
    """The state that a replica loaded.

    Attributes:
        state: the state.
        shards: reads the tensors that are on the meta device in `state`; None if it has all values.
    """

    state: Any
    shards: ShardedCheckpoint | None = None


@dataclass(frozen=True)
class _Choice:
    """The checkpoint that one replica found, before any is loaded.

    Attributes:
        place: the newest checkpoint; None if there is none.
        error: why the directory could not be searched.
    """

    place: Location | None = None
    error: CheckpointError | None = None


@dataclass(frozen=True)
class _Attempt:
    """One replica's attempt to load the checkpoint.

    Attributes:
        host: name of its host.
        content: checksum of the file's header, which holds all other checksums; empty on an error.
        step: the step in it; None if a Trainer did not write it.
        error: why it could not be loaded.
    """

    host: str
    content: str = ""
    step: Any = None
    error: CheckpointError | None = None


def find_checkpoint(
    replica: Collectives,
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


def load_same(
    replica: Collectives, source: str, directory: str | os.PathLike[str] | None, *, in_shards: bool = False
) -> tuple[Location, Loaded] | None:
    """Load the checkpoint to resume from. A collective.

    Hosts without a common file system would train from different states, or wait for each other forever.

    Args:
        replica: this replica.
        source: path or URL of the checkpoint, or ``auto`` for ordinal 0's newest intact one in `directory`.
        directory: directory of the checkpoints.
        in_shards: leave the tensors of a checkpoint in shards unread whose names begin as in `UNREAD`.

    Returns:
        The checkpoint and what was loaded; None if there is no checkpoint in any replica's `directory`.

    Raises:
        CheckpointError: in every replica, if one cannot load the checkpoint, or they loaded different ones.
    """
    where = f"resume={source!r}"
    # A path that the user wrote is the same in all replicas, so there is nothing to choose.
    if source != "auto":
        place, loaded = locate(source), None
    else:
        choose = partial(_choose, replica, directory, in_shards)
        choice, loaded = run_while_others_wait(replica, choose)
        # Gathered even after an error: a replica that raised here alone would leave the others waiting.
        choices = replica.all_gather(choice)
        if errors := [choice.error for choice in choices if choice.error is not None]:
            raise choice.error or errors[0]
        # Ordinal 0 decides for all: hosts may see different directories, and different newest checkpoints.
        if choices[0].place is None:
            _check_none(choices, replica.all_gather(socket.gethostname()), where)
            return None
        place = choices[0].place
    attempt = partial(_attempt, replica, in_shards, place, loaded)
    outcome, loaded = run_while_others_wait(replica, attempt)
    # Errors are raised here and not above, so that all replicas take part and all of them raise.
    _check_same(outcome, replica.all_gather(outcome), str(place), where)
    assert loaded is not None
    return place, loaded


def _attempt(
    replica: Collectives, in_shards: bool, place: Location, loaded: Loaded | None
) -> tuple[_Attempt, Loaded | None]:
    """Read a checkpoint, unless it is `loaded` already; return what came of it."""
    host = socket.gethostname()
    try:
        loaded = _read(replica, in_shards, place) if loaded is None else loaded
        step = loaded.state.get("step") if isinstance(loaded.state, Mapping) else None
        return _Attempt(host, fingerprint(place), step), loaded
    except CheckpointError as error:
        return _Attempt(host, error=error), None


def _read(replica: Collectives, in_shards: bool, place: Location) -> Loaded:
    if not (in_shards and is_sharded(place)):
        return Loaded(load(place))
    from polyxla_training.checkpoint.shard_reader import ShardedCheckpoint

    shards = ShardedCheckpoint(place)
    if replica.is_first:
        # One replica checks for all: there may be a file from each of many replicas.
        shards.check()
    return Loaded(shards.state(unread=UNREAD), shards)


def _choose(
    replica: Collectives, directory: str | os.PathLike[str] | None, in_shards: bool
) -> tuple[_Choice, Loaded | None]:
    if directory is None:
        return _Choice(), None
    folder = CheckpointFolder(directory)
    try:
        if replica.is_first:
            # Only ordinal 0 reads here: to find an intact file it may have to read damaged ones in full.
            entry, loaded = folder.newest_intact(partial(_read, replica, in_shards)) or (None, None)
            return _Choice(entry.path if entry else None), loaded
        # One replica of a process looks, because the others in it see the same files.
        entry = folder.latest() if replica.world.owns_process else None
        return _Choice(entry.path if entry else None), None
    except CheckpointError as error:
        return _Choice(error=error), None


def _check_none(choices: Sequence[_Choice], hosts: Sequence[str], where: str) -> None:
    """Raise if only ordinal 0 has no checkpoint: the run would start again from the beginning."""
    others = [(ordinal, choice.place) for ordinal, choice in enumerate(choices) if choice.place is not None]
    if others:
        ordinal, place = others[0]
        raise CheckpointError(
            f"ordinal 0 on {hosts[0]} finds no checkpoint, and ordinal {ordinal} on {hosts[ordinal]} "
            f"finds {place}",
            where=where,
            fix=_FIX,
        )


def _check_same(own: _Attempt, attempts: Sequence[_Attempt], place: str, where: str) -> None:
    if all(attempt.error is not None for attempt in attempts):
        raise own.error or CheckpointError(f"{place!r} cannot be loaded", where=where, fix=_FIX)
    groups: dict[tuple[str, str], list[int]] = {}
    for ordinal, attempt in enumerate(attempts):
        groups.setdefault((attempt.content, attempt.error.what if attempt.error else ""), []).append(ordinal)
    # Equal checksums of the header mean equal files, because the header holds the tensors' checksums.
    if len(groups) == 1:
        return
    found = []
    for (content, problem), ordinals in groups.items():
        # Grouped, because thousands of replicas must fit into one message.
        who = _who(ordinals, [attempts[ordinal].host for ordinal in ordinals])
        found.append(f"{who}: {problem or f'step {attempts[ordinals[0]].step}, checksum {content}'}")
    raise CheckpointError(
        f"replicas cannot resume from the same {place!r}: {'; '.join(found)}", where=where, fix=_FIX
    )


def _who(ordinals: Sequence[int], hosts: Sequence[str]) -> str:
    # In the order of the ordinals, without repeats.
    names = list(dict.fromkeys(hosts))
    more = f" and {len(names) - MAX_NAMES} more hosts" if len(names) > MAX_NAMES else ""
    first, last = ordinals[0], ordinals[-1]
    if first == last:
        what = f"ordinal {first}"
    elif last - first + 1 == len(ordinals):
        what = f"ordinals {first} to {last}"
    else:
        what = f"ordinal {first} and {len(ordinals) - 1} more"
    return f"{what} on {', '.join(names[:MAX_NAMES])}{more}"


_FIX = (
    "Write checkpoints to a file system that all hosts share, or to a URL such as gs://bucket/run, and give "
    "all hosts the same path."
)


KEYS = ("module", "optimizer")


def load_into(
    path: str | os.PathLike[str], module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Load a checkpoint into a module and its optimizer.

    Each replica reads its shards of what a mesh divides. Not a collective. The checkpoint may be a file, or
    have been saved in another division.

    Args:
        path: a checkpoint of a dict with ``module`` and ``optimizer``, their state dicts; or its URL.
        module: the module, after `Replica.setup`.
        optimizer: holds its parameters.

    Returns:
        The rest of the dict.

    Raises:
        CheckpointError: it cannot be read, or does not fit.
        DamagedCheckpointError: a file is missing, or not as it was written.
        UsageError: a package that the URL needs is not installed.
    """
    from polyxla_training.checkpoint.shard_reader import ShardedCheckpoint
    from polyxla_training.sharding.sharded_state import divide_into

    check_location(path, "load_into")
    place = locate(path)
    # A file has all tensors whole; each replica reads it and keeps its shards.
    shards = ShardedCheckpoint(place) if is_sharded(place) else None
    state = load(place) if shards is None else shards.state(unread=tuple(f"{key}." for key in KEYS))
    if not isinstance(state, dict) or not all(isinstance(state.get(key), dict) for key in KEYS):
        raise CheckpointError(
            f"{str(place)!r} does not hold a dict with 'module' and 'optimizer'",
            where="load_into",
            fix='Save {"module": module.state_dict(), "optimizer": optimizer.state_dict(), ...}.',
        )
    # Before anything is loaded, so that a module that does not fit is unchanged.
    check_state(module.state_dict(), state["module"], where=str(place))
    try:
        divide_into(module, optimizer, state["module"], state["optimizer"], True, shards)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"the optimizer does not fit: {error}",
            where=str(place),
            fix="Make the optimizer as it was when the checkpoint was written.",
        ) from error
    return {key: value for key, value in state.items() if key not in KEYS}
