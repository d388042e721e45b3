"""Checkpoints: `save` and `load` files that any safetensors reader opens, and folders of them.

Nothing here meets other replicas: all of them may call it, or one. Importing it imports no torch.
"""

from __future__ import annotations

from polyxla_training.checkpoint.api import Format as Format
from polyxla_training.checkpoint.api import load as load
from polyxla_training.checkpoint.api import save as save
from polyxla_training.checkpoint.background_writer import Writer as Writer
from polyxla_training.checkpoint.errors import CheckpointError as CheckpointError
from polyxla_training.checkpoint.errors import DamagedCheckpointError as DamagedCheckpointError
from polyxla_training.checkpoint.folder import CheckpointFolder as CheckpointFolder
from polyxla_training.checkpoint.folder import Entry as Entry
from polyxla_training.checkpoint.state_check import check_state as check_state
from polyxla_training.checkpoint.stop_signal import StopSignal as StopSignal

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
