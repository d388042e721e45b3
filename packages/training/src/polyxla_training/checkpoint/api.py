"""`save`, `load`, and `BackgroundWriter`, which saves while the training goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from polyxla_training.checkpoint.atomic import STATE, is_sharded
from polyxla_training.checkpoint.errors import CheckpointError
from polyxla_training.storage import check_location, locate

if TYPE_CHECKING:
    import torch

Format = Literal["safetensors", "torch"]
"""Format of a checkpoint's file; ``torch`` is a file of ``torch.save``."""


def save(state: Any, path: str | os.PathLike[str], *, format: Format = "safetensors") -> None:
    """Write a state to a file. The file replaces an existing one atomically, and is durable on return.

    A file in an object store (``gs://bucket/state.safetensors``) is uploaded while it is encoded, without a
    copy on this machine. Tensors on a device are then read twice: for the checksum and for the bytes.

    Any safetensors reader opens the file, on any machine. Tensors are read from their device one at a time,
    so the host needs memory for the largest; a contiguous tensor in host memory is written without a copy.
    Pending XLA work is computed first, tensor by tensor: submit it with `Replica.sync` before.

    If tensors are divided among replicas (torch's DTensors), this is a collective: every replica calls it and
    writes its shards, and `path` becomes a directory, which `load` reads too. It appears once it is complete.

    Args:
        state: tensors (of any dtype, on any device), numbers, text, bytes, None, torch's dtypes, devices and
            sizes, in lists, tuples, dicts, OrderedDicts and Counters with text or integers as keys. Tied
            tensors and views of each other are written once.
        path: the file, or its URL in an object store. Missing directories are made.
        format: ``safetensors``, or ``torch`` for a file of ``torch.save``, which needs host memory for all
            tensors, none of them divided.

    Raises:
        CheckpointError: the state has a value of an unsupported type, and nothing was written; or the file
            cannot be written, and an existing one is unchanged.
        UsageError: a package that the URL needs is not installed.
    """
    from polyxla_training.checkpoint.state_codec import EncodedState, encode_state
    from polyxla_training.checkpoint.state_file import write_safetensors, write_torch

    _check_format(format, "save")
    check_location(path, "save")
    # A BackgroundWriter has encoded the state already, in the thread that trains.
    encoded = state if isinstance(state, EncodedState) else encode_state(state)
    if encoded.is_divided:
        _check_divisible(format)
        from polyxla_training.checkpoint.shard_writer import write_shards

        write_shards(encoded, locate(path))
        return
    write = write_torch if format == "torch" else write_safetensors
    write(encoded, locate(path))


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    format: Format = "safetensors",
    verify: bool = True,
) -> Any:
    """Read the state in a file, with the types that were saved. No code in the file is ever run.

    Of a directory that replicas wrote in shards, the tensors are put together; one chunk at a time is in host
    memory beside them.

    A safetensors file of another program gives a dict of its tensors by name.

    Args:
        path: the file or directory, or its URL in an object store.
        device: device for the tensors. They do not require gradients; a Parameter comes back as a tensor.
        format: ``torch`` to read a file of ``torch.save`` that holds tensors and plain values only.
        verify: compare each tensor with its checksum.

    Raises:
        CheckpointError: the file does not exist, has the other format, or has content that may run code.
        DamagedCheckpointError: the file is not as it was written.
        UsageError: a package that the URL needs is not installed.
    """
    import torch

    from polyxla_training.checkpoint import state_file

    _check_format(format, "load")
    check_location(path, "load")
    # A directory has shards. Whether a URL is a directory takes a request to the store.
    place, device = locate(path), torch.device(device)
    if is_sharded(place):
        from polyxla_training.checkpoint.shard_reader import ShardedCheckpoint

        return ShardedCheckpoint(place, verify=verify).state(device=device)
    with state_file.opened(place) as file:
        if format == "torch":
            return state_file.read_torch(file, str(place), device)
        # Reported by name: such a file would otherwise look like a damaged safetensors file.
        if state_file.is_torch(file):
            raise CheckpointError(
                f"{str(place)!r} is a file of torch.save",
                where="load",
                fix='Write load(path, format="torch"); only tensors and plain values are read from it.',
            )
        return state_file.read_safetensors(file, place.stat().st_size, device, verify)


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Return a checksum of what `save` wrote: equal for equal content. Reads one file's header only.

    Raises:
        CheckpointError: the file cannot be read.
    """
    from polyxla_training.checkpoint import state_file

    place = locate(path)
    # The manifest's header has the checksum of the whole manifest, and that has those of all shards.
    with state_file.opened(place / STATE if is_sharded(place) else place) as file:
        return state_file.header_checksum(file)


def _check_divisible(format: str) -> None:
    if format == "torch":
        raise CheckpointError(
            "the state has tensors that are divided among replicas",
            where='save(format="torch")',
            fix='Leave format="torch" out; each replica then writes its shards.',
        )


def _check_format(format: str, where: str) -> None:
    if format not in ("safetensors", "torch"):
        raise CheckpointError(
            f"{format!r} is not a checkpoint format", where=where, fix='Write "safetensors" or "torch".'
        )


WAIT_TIMEOUT_S = 1800.0
"""Maximum wait for the previous checkpoint, in seconds: in half an hour a disk writes 180 GB at 100 MB/s."""


class BackgroundWriter:
    """Saves in the background, one state at a time.

    A context manager; leaving it waits for the last write. Use each writer from one thread. The next `submit`
    or `close` raises the errors of the background. The process does not end before its writes do.

    Args:
        timeout_s: maximum wait for the previous write, in seconds.
    """

    def __init__(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        # One thread at most, so host memory holds one copy of the state.
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._failure: BaseException | None = None

    def submit(self, save: Callable[[Any], object], state: Any) -> None:
        """Copy a state to host memory, and call ``save(copy)`` in a thread.

        Waits for the previous write, then for the copy, so host memory holds at most one copy. The state may
        change as soon as this returns.

        Args:
            save: `polyxla_training.save` or `CheckpointFolder.save` with its other arguments, such as
                ``functools.partial(folder.save, step)``.
            state: as for `polyxla_training.save`.

        Raises:
            CheckpointError: the state has a value of an unsupported type, or the previous write did not end
                in time.
            Exception: what the previous write raised.
        """
        from polyxla_training.checkpoint.state_codec import snapshot

        self._wait()
        copied = snapshot(state)
        self._started = time.monotonic()
        # A new thread for each write: threads do not survive a fork, so a process that is forked between two
        # writes would inherit a dead one. Not a daemon: Python waits for it before it exits.
        self._thread = threading.Thread(
            target=self._write, args=(save, copied), name="polyxla-checkpoint-writer"
        )
        self._thread.start()

    def close(self) -> None:
        """Wait for the last write.

        Raises:
            CheckpointError: the write did not end in time.
            Exception: what the write raised.
        """
        self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            # The error that ended the block is the one to raise.
            error.add_note(f"the last checkpoint was not written either: {failure}")

    def _write(self, save: Callable[[Any], object], copied: Any) -> None:
        try:
            save(copied)
        except BaseException as error:
            self._failure = error

    def _wait(self) -> None:
        if self._thread is not None:
            # The limit is one for the whole write, so it counts from the write's start.
            self._thread.join(max(0.0, self._started + self._timeout_s - time.monotonic()))
            if self._thread.is_alive():
                raise CheckpointError(
                    f"writing a checkpoint has taken longer than {self._timeout_s:g} s and is not finished",
                    where="BackgroundWriter(timeout_s=...)",
                    fix="Save less often, use a faster disk, or pass a longer timeout_s.",
                )
            self._thread = None
        # Raised once: the caller may go on to save later states with this writer.
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
