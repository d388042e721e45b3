"""`Library`: a PJRT plugin, and how to open it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polyxla_bridge.plugin_client.memory import Option

TPU = "tpu"
"""The platform of libtpu's devices."""


@dataclass(frozen=True)
class Library:
    """A PJRT plugin, and how to open it.

    Attributes:
        path: the plugin's file.
        source: where it was chosen, for errors.
        options: the plugin's own options for its client.
        variables: those that only the serving process gets, before it opens the plugin.
        platform: the kind of the devices; empty if the plugin knows better.
    """

    path: Path
    source: str
    options: Mapping[str, Option] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    platform: str = ""
