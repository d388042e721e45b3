"""Training on `polyxla.launch`: Trainer, checkpoints, replica checks and the observer.

Importing this imports no torch.
"""

from polyxla_training.checkpoint import CheckpointError, CheckpointFolder, DamagedCheckpointError, load, save
from polyxla_training.listeners.early_stopping import EarlyStopping
from polyxla_training.replica_check import ReplicaCheck, check_replicas
from polyxla_training.resume import load_into
from polyxla_training.trainer import Trainer

__all__ = [
    "CheckpointError",
    "CheckpointFolder",
    "DamagedCheckpointError",
    "EarlyStopping",
    "ReplicaCheck",
    "Trainer",
    "check_replicas",
    "load",
    "load_into",
    "save",
]
