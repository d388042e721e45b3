"""Checkpoints: `save` and `load` files that any safetensors reader opens, and folders of them.

Nothing here meets other replicas: all of them may call it, or one. Importing it imports no torch.
"""

from __future__ import annotations

from polyxla.checkpoint.errors import CheckpointError as CheckpointError
from polyxla.checkpoint.errors import DamagedCheckpointError as DamagedCheckpointError
from polyxla.checkpoint.folder import CheckpointFolder as CheckpointFolder
from polyxla.checkpoint.folder import Entry as Entry
from polyxla.checkpoint.matching import check_state as check_state
from polyxla.checkpoint.signals import StopSignal as StopSignal
from polyxla.checkpoint.storing import Format as Format
from polyxla.checkpoint.storing import load as load
from polyxla.checkpoint.storing import save as save
from polyxla.checkpoint.writer import Writer as Writer

__all__ = [
    "CheckpointError",
    "CheckpointFolder",
    "DamagedCheckpointError",
    "Entry",
    "Format",
    "StopSignal",
    "Writer",
    "check_state",
    "load",
    "save",
]
