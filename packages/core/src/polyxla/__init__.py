"""PyTorch training on TPUs with a runtime that is chosen when the program starts.

Importing this imports neither torch nor any runtime.
"""

from polyxla.contracts.discovery import Claim as Claim
from polyxla.contracts.discovery import Device as Device
from polyxla.contracts.discovery import Discovery as Discovery
from polyxla.contracts.job import Job as Job
from polyxla.contracts.precision import Precision as Precision
from polyxla.contracts.replication import Replication as Replication
from polyxla.contracts.world import World as World
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
from polyxla.launcher.launch import launch as launch
from polyxla.replica.random_state import seed_everything as seed_everything
from polyxla.replica.replica import Replica as Replica

__all__ = [
    "BrokenPluginError",
    "Claim",
    "Device",
    "DevicesError",
    "Discovery",
    "Job",
    "PolyxlaError",
    "Precision",
    "Replica",
    "ReplicaLostError",
    "Replication",
    "RuntimeNotInstalledError",
    "RuntimeUnavailableError",
    "Setting",
    "StalledError",
    "UnknownRuntimeError",
    "UsageError",
    "World",
    "hookimpl",
    "launch",
    "seed_everything",
]
