"""A state, taken apart into what a file holds: JSON for the nest, and tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from polyxla_training.checkpoint.state_codec import Encoder, decode
from polyxla_training.checkpoint.tensor_aliasing import Part, shared


@dataclass
class Packed:
    """A state to be written.

    Attributes:
        nest: the nest's JSON.
        parts: its tensors, those with the largest items first, so that each begins at a multiple of its own.
    """

    nest: str
    parts: list[Part]


def pack(state: Any) -> Packed:
    """Take a state apart; its tensors stay where they are.

    Raises:
        CheckpointError: something in it is of a type that is not kept.
    """
    encoder = Encoder()
    nest = encoder.encode(state)
    parts = sorted(shared(encoder.found), key=lambda part: -part.tensor.itemsize)
    return Packed(json.dumps(nest, separators=(",", ":")), parts)


def unpack(nest: str, tensor: Callable[[str, torch.dtype], torch.Tensor]) -> Any:
    """Put a state together again; see `polyxla_training.checkpoint.state_codec.decode`."""
    return decode(json.loads(nest), tensor)


def snapshot(state: Any) -> Packed:
    """Take a state apart into host memory of its own, so that it may change meanwhile.

    Blocks until every tensor is computed and copied, one after the other.

    Raises:
        CheckpointError: something in it is of a type that is not kept.
    """
    packed = pack(state)
    for part in packed.parts:
        copied = on_host(part.tensor)
        is_same = part.tensor.device.type == "cpu" and copied.data_ptr() == part.tensor.data_ptr()
        part.tensor = copied.clone() if is_same else copied
    return packed


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory without gaps: itself if it is, otherwise a copy."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
