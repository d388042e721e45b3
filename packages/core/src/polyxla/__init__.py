"""PyTorch training on TPUs with a runtime that is chosen when the script starts.

Importing this package imports neither torch nor any runtime.
"""

import importlib.metadata

from polyxla.contracts.discovery import Claim, Device, Discovery
from polyxla.contracts.job import Job
from polyxla.contracts.precision import Precision
from polyxla.contracts.replication import Replication
from polyxla.contracts.world import World
from polyxla.env import Setting
from polyxla.errors import (
    BrokenPluginError,
    DevicesError,
    DisagreementError,
    PolyxlaError,
    ReplicaLostError,
    RuntimeNotInstalledError,
    RuntimeUnavailableError,
    StalledError,
    UnknownRuntimeError,
    UsageError,
)
from polyxla.hookspecs import hookimpl
from polyxla.launcher.launch import launch
from polyxla.replica.random_state import seed_everything
from polyxla.replica.replica import Replica

__all__ = [
    "BrokenPluginError",
    "Claim",
    "Device",
    "DevicesError",
    "DisagreementError",
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


def __getattr__(name: str) -> str:
    if name == "__version__":
        # Not at import: it is a file to read.
        return importlib.metadata.version("polyxla-core")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
