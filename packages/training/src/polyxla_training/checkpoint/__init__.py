"""Checkpoints: `save` and `load` of files that any safetensors reader opens, and directories of them.

Nothing here is a collective: one replica may call it, or all. Importing this imports no torch.
"""

from polyxla_training.checkpoint.api import BackgroundWriter, Format, fingerprint, load, save
from polyxla_training.checkpoint.errors import CheckpointError, DamagedCheckpointError, check_state
from polyxla_training.checkpoint.folder import CheckpointEntry, CheckpointFolder
from polyxla_training.checkpoint.stop_signal import StopSignal

__all__ = [
    "BackgroundWriter",
    "CheckpointEntry",
    "CheckpointError",
    "CheckpointFolder",
    "DamagedCheckpointError",
    "Format",
    "StopSignal",
    "check_state",
    "fingerprint",
    "load",
    "save",
]
