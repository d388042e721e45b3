"""`load_into`: resuming in a loop of the user's own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from polyxla_training.checkpoint import CheckpointError, check_state, load
from polyxla_training.checkpoint.shards.layout import is_sharded
from polyxla_training.storage.location import check_location, locate

if TYPE_CHECKING:
    import torch

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
    from polyxla_training.checkpoint.shards.reader import ShardedCheckpoint
    from polyxla_training.sharding.sharded_state import divide_into

    check_location(path, "load_into")
    place = locate(path)
    shards = ShardedCheckpoint(place) if is_sharded(place) else None
    state = load(place) if shards is None else shards.state(unread=tuple(f"{key}." for key in KEYS))
    if not isinstance(state, dict) or not all(isinstance(state.get(key), dict) for key in KEYS):
        raise CheckpointError(
            f"{str(place)!r} does not hold a dict with 'module' and 'optimizer'",
            where="load_into",
            fix='Save {"module": module.state_dict(), "optimizer": optimizer.state_dict(), ...}.',
        )
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
