"""PyTorch training on TPUs with a runtime that is chosen when the script starts.

These names are for programs; plugins are written with `polyxla.plugin`. Importing this package imports
neither torch nor any runtime.
"""

import importlib.metadata

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
    "DevicesError",
    "DisagreementError",
    "PolyxlaError",
    "Replica",
    "ReplicaLostError",
    "RuntimeNotInstalledError",
    "RuntimeUnavailableError",
    "StalledError",
    "UnknownRuntimeError",
    "UsageError",
    "hookimpl",
    "launch",
    "seed_everything",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        # Reading the version reads a file, which no import should pay for.
        return importlib.metadata.version("polyxla-core")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
