"""Writing a state whose tensors are divided among replicas: each replica writes its shards.

torch.distributed.checkpoint plans which replica writes which tensors; the files are polyxla's.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from polyxla_training.checkpoint.atomic import SHARD, NewDirectory
from polyxla_training.checkpoint.errors import CheckpointError
from polyxla_training.checkpoint.shard_reader import Chunk, DividedTensor, Manifest, file_checksum
from polyxla_training.checkpoint.state_codec import EncodedState, encode_state
from polyxla_training.checkpoint.state_file import write_safetensors
from polyxla_training.checkpoint.tensors import checkpoint_group
from polyxla_training.shared_directory import appears
from polyxla_training.storage import Location


def write_shards(state: EncodedState, path: Location) -> bool:
    """Write this replica's shards of a state. A collective; returns when all shards are durable.

    Tensors that are not divided are written once, as the lowest ordinal that has them holds them.

    Returns:
        Whether this is ordinal 0, which has made the directory.

    Raises:
        CheckpointError: in every replica, if one of them cannot write.
    """
    directory, group = NewDirectory(path), checkpoint_group()
    # The state is encoded already, so it is flat. Tensors that all replicas hold are written once.
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    try:
        save(
            {stored.name: stored.tensor for stored in state.tensors},
            storage_writer=_ShardWriter(state.tree, directory),
            planner=planner,
            process_group=group,
        )
    except CheckpointException as error:
        # Several replicas may fail for one reason; the lowest ordinal's error stands for all.
        ordinal, (cause, _) = min(error.failures.items())
        raise _failed(path, ordinal, cause) from error
    # gloo raises it when a process of the group has ended, or when the group's timeout is over.
    except RuntimeError as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be written, because another replica was lost: "
            f"{str(error).partition(chr(10))[0]}",
            where="save",
            fix="Read that replica's error; resume from the checkpoint before this one.",
        ) from error
    finally:
        directory.close()
    return dist.get_rank(group) == 0


def _failed(path: Location, ordinal: int, cause: BaseException) -> CheckpointError:
    if isinstance(cause, CheckpointError):
        return CheckpointError(f"ordinal {ordinal}: {cause.what}", where=cause.where, fix=cause.fix)
    return CheckpointError(
        f"{str(path)!r} cannot be written: ordinal {ordinal}: {cause!r}",
        where="save",
        fix="Save the same state in all replicas, each of which must call this.",
    )


class _ShardWriter(StorageWriter):
    """One replica's file of a checkpoint; in ordinal 0 also the directory and the manifest.

    Args:
        tree: the state's pytree.
        directory: where the checkpoint appears.
    """

    def __init__(self, tree: str, directory: NewDirectory) -> None:
        self._tree, self._directory = tree, directory
        self._place: Location | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Do nothing: ordinal 0 knows itself by the calls that only it receives."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory, and tell each replica its file. Called in ordinal 0 only."""
        self._place = self._directory.create()
        return [
            dataclasses.replace(plan, storage_data=self._place / f"{SHARD}{ordinal:05d}.safetensors")
            for ordinal, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this replica's file, durably.

        Raises:
            CheckpointError: it cannot be written, or this host does not share the directory.
        """
        done: Future[list[WriteResult]] = Future()
        # A replica may have nothing to write, for example if the others hold the same tensors.
        if not plan.items:
            done.set_result([])
            return done
        # Ordinal 0 has chosen the name, so that all replicas write into the directory that it has made.
        path: Location = plan.storage_data
        _check_directory(path)
        tensors = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        write_safetensors(encode_state(tensors), path)
        stored = (path.name, file_checksum(path))
        size_bytes = path.stat().st_size
        done.set_result([WriteResult(item.index, size_bytes, stored) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, and let the checkpoint appear. Called in ordinal 0, after all have written."""
        assert self._place is not None
        written = [result for of_replica in results for result in of_replica]
        files = {(result.index.fqn, result.index.offset): result.storage_data[0] for result in written}
        tensors = {
            name: _described(name, tensor, files)
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        Manifest(self._tree, tensors, dict(result.storage_data for result in written)).write(self._place)
        # All shards are durable: torch's planner calls this after every replica has written.
        self._directory.commit()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Return False: this writer is made for one place, and found by no id."""
        return False


def _check_directory(file: Location) -> None:
    """Check that this replica sees the directory that ordinal 0 has made. An object store has none."""
    # Checked by each replica: a host without the shared directory would otherwise write to a disk of its
    # own.
    if isinstance(file, Path) and not appears(file.parent):
        raise CheckpointError(
            f"{socket.gethostname()} does not see the directory {str(file.parent)!r} that ordinal 0 has "
            "made: the hosts do not share it",
            where="save",
            fix="Save to a file system that all hosts share, or to a URL such as gs://bucket/run, and give "
            "all hosts the same path.",
        )


def _described(
    name: str, tensor: TensorStorageMetadata, files: dict[tuple[str, torch.Size | None], str]
) -> DividedTensor:
    chunks = [
        Chunk(tuple(chunk.offsets), tuple(chunk.sizes), files[name, chunk.offsets]) for chunk in tensor.chunks
    ]
    return DividedTensor(tensor.properties.dtype, tuple(tensor.size), tuple(chunks))
