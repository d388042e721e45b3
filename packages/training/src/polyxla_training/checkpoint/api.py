"""`save` and `load`: one file for one state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyxla_training.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    import torch

Format = Literal["safetensors", "torch"]
"""What a checkpoint's file is; ``torch`` is a file of ``torch.save``."""


def save(state: Any, path: str | os.PathLike[str], *, format: Format = "safetensors") -> None:
    """Write a state to a file that replaces the one before it as a whole, and is durable on return.

    The safetensors file opens in any reader of that format, on any machine. Tensors are read from their
    device one at a time, so the host needs room for the largest; one that is in host memory without gaps is
    written from where it is. Pending XLA work is computed first, tensor by tensor: hand it over with
    `Replica.sync` before.

    Args:
        state: tensors (of any dtype, on any device), numbers, text, bytes, None, torch's dtypes, devices and
            sizes, in lists, tuples, dicts, OrderedDicts and Counters with text or whole numbers as keys.
            Tied tensors and views of each other are written once.
        path: the file. Missing folders are made.
        format: ``safetensors``, or ``torch`` for a file of ``torch.save``, which needs room for all tensors.

    Raises:
        CheckpointError: something in the state cannot be kept, said before anything is written; or the file
            cannot be written, and what was there before still is.
    """
    from polyxla_training.checkpoint.file_writer import write_safetensors, write_torch
    from polyxla_training.checkpoint.state_packing import Packed, pack

    _check_format(format, "save")
    packed = state if isinstance(state, Packed) else pack(state)
    write = write_torch if format == "torch" else write_safetensors
    write(packed, Path(path))


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    format: Format = "safetensors",
    verify: bool = True,
) -> Any:
    """Read the state that a file holds; its types are as they were, and no code in it is ever run.

    Of a safetensors file that others wrote, the state is a dict of its tensors by name.

    Args:
        path: the file.
        device: where its tensors are to be. They come without gradients; a Parameter is a tensor.
        format: ``torch`` to read a file of ``torch.save``, in which tensors and plain values are allowed.
        verify: whether to compare each tensor with its checksum.

    Raises:
        CheckpointError: there is no such file, it is of the other format, or it holds what may run code.
        DamagedCheckpointError: it is not as it was written.
    """
    import torch

    from polyxla_training.checkpoint import file_reader

    _check_format(format, "load")
    path, device = Path(path), torch.device(device)
    with file_reader.opened(path) as file:
        if format == "torch":
            return file_reader.read_torch(file, device)
        if file_reader.is_torch(file):
            raise CheckpointError(
                f"{str(path)!r} is a file of torch.save",
                where="load",
                fix='Write load(path, format="torch"); only tensors and plain values are read from it.',
            )
        return file_reader.read_safetensors(file, path.stat().st_size, device, verify)


def _check_format(format: str, where: str) -> None:
    if format not in ("safetensors", "torch"):
        raise CheckpointError(
            f"no checkpoint has the format {format!r}", where=where, fix='Write "safetensors" or "torch".'
        )
