"""Training on `polyxla.launch`: Trainer, checkpoints, replica checks and the observer.

Importing this imports no torch.
"""

from polyxla_training.checkpoint import CheckpointError as CheckpointError
from polyxla_training.checkpoint import CheckpointFolder as CheckpointFolder
from polyxla_training.checkpoint import DamagedCheckpointError as DamagedCheckpointError
from polyxla_training.checkpoint import load as load
from polyxla_training.checkpoint import save as save
from polyxla_training.replica_check import ReplicaCheck as ReplicaCheck
from polyxla_training.replica_check import check_replicas as check_replicas
from polyxla_training.trainer import Trainer as Trainer
