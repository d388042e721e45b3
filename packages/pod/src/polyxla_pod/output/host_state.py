"""What the launcher knows of a host, for the table on a terminal and ``polyxla pod ps``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyxla_pod.output.progress import Progress


@dataclass
class HostState:
    """A host's state.

    Attributes:
        name: as the engine calls it.
        state: ``connecting``, ``checking``, ``copying``, ``starting its worker``, ``running``, ``ended`` or
            ``failed``.
        progress: what its lines say.
    """

    name: str
    state: str = "connecting"
    progress: Progress = field(default_factory=Progress)

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON-compatible values."""
        progress = self.progress
        numbers = {"step": progress.step, "loss": progress.loss, "steps_per_s": progress.steps_per_s}
        return {"name": self.name, "state": self.state, **numbers, "last_line": progress.last_line}
