"""PyTorch training on TPUs with a runtime that is chosen when the program starts.

Importing this imports neither torch nor any runtime.
"""

from polyxla.check import ReplicaCheck as ReplicaCheck
from polyxla.check import check_replicas as check_replicas
from polyxla.checkpoint import CheckpointError as CheckpointError
from polyxla.checkpoint import CheckpointFolder as CheckpointFolder
from polyxla.checkpoint import DamagedCheckpointError as DamagedCheckpointError
from polyxla.checkpoint import load as load
from polyxla.checkpoint import save as save
from polyxla.devices import Claim as Claim
from polyxla.devices import Device as Device
from polyxla.devices import Discovery as Discovery
from polyxla.env import Setting as Setting
from polyxla.errors import BrokenPluginError as BrokenPluginError
from polyxla.errors import DevicesError as DevicesError
from polyxla.errors import PolyxlaError as PolyxlaError
from polyxla.errors import ReplicaLostError as ReplicaLostError
from polyxla.errors import RuntimeNotInstalledError as RuntimeNotInstalledError
from polyxla.errors import RuntimeUnavailableError as RuntimeUnavailableError
from polyxla.errors import StalledError as StalledError
from polyxla.errors import UnknownRuntimeError as UnknownRuntimeError
from polyxla.errors import UsageError as UsageError
from polyxla.hookspecs import hookimpl as hookimpl
from polyxla.launch import Job as Job
from polyxla.launch import launch as launch
from polyxla.precision import Precision as Precision
from polyxla.replica import Replica as Replica
from polyxla.replication import Replication as Replication
from polyxla.seeding import seed_everything as seed_everything
from polyxla.trainer import Trainer as Trainer
from polyxla.world import World as World

__all__ = [
    "BrokenPluginError",
    "CheckpointError",
    "CheckpointFolder",
    "Claim",
    "DamagedCheckpointError",
    "Device",
    "DevicesError",
    "Discovery",
    "Job",
    "PolyxlaError",
    "Precision",
    "Replica",
    "ReplicaCheck",
    "ReplicaLostError",
    "Replication",
    "RuntimeNotInstalledError",
    "RuntimeUnavailableError",
    "Setting",
    "StalledError",
    "Trainer",
    "UnknownRuntimeError",
    "UsageError",
    "World",
    "check_replicas",
    "hookimpl",
    "launch",
    "load",
    "save",
    "seed_everything",
]
