"""A logged run, read from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyxla.errors import UsageError

Curve = list[tuple[float, float]]
"""Points ``(step, value)``, in the order of the steps."""


@dataclass(frozen=True)
class Run:
    """The events of one run, by kind.

    Attributes:
        folder: the path that it was read from.
        start: the start event.
        steps: the events of every n-th step.
        compiles: the compilations.
        findings: lines that read the device or fall back.
        metrics: means of evaluations and epochs.
        not_finite: names of values that became NaN or infinite, with the step.
        end: the end event; None if the run was killed, or is still running.
    """

    folder: str
    start: Mapping[str, Any]
    steps: list[dict[str, Any]]
    compiles: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    not_finite: list[dict[str, Any]]
    end: Mapping[str, Any] | None

    @classmethod
    def of(cls, folder: str, events: Iterable[dict[str, Any]]) -> Run:
        """Sort the events that `polyxla_training.observe.read_run` returned.

        Raises:
            UsageError: the first is not a run's start.
        """
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for event in events:
            by_kind.setdefault(str(event.get("event")), []).append(event)
        if "start" not in by_kind:
            raise UsageError("these events have no start event", where=folder, fix="Read them with read_run.")
        return cls(
            folder=folder,
            start=by_kind["start"][0],
            steps=by_kind.get("step", []),
            compiles=by_kind.get("compile", []),
            findings=by_kind.get("finding", []),
            metrics=by_kind.get("metrics", []),
            not_finite=by_kind.get("not_finite", []),
            end=by_kind["end"][-1] if "end" in by_kind else None,
        )

    @property
    def summary(self) -> Mapping[str, Any]:
        """The run's totals; without an end event, the sums of its events."""
        if self.end is not None:
            summary: Mapping[str, Any] = self.end["summary"]
            return summary
        last = self.steps[-1] if self.steps else {}
        return {
            "steps": last.get("step", 0),
            "compiles": sum(one["compiles"] for one in self.compiles),
            "compile_s": sum(one["seconds"] for one in self.compiles),
            "unexpected": sum(one["compiles"] for one in self.compiles if not one["expected"]),
            **{name: last.get(name) for name in ("step_s", "records_per_s", "wait_share", "mfu")},
        }

    @property
    def outcome(self) -> str:
        """How it ended, in a few words."""
        if self.end is None:
            return "no end: it was killed, or is still running"
        error = self.end["error"]
        return f"ended by {error}" if error else "finished"

    def rate(self, name: str, scale: float = 1.0) -> Curve:
        """Return one of the rates of every n-th step; steps without it are left out."""
        return [(one["step"], one[name] * scale) for one in self.steps if one.get(name) is not None]

    def memory(self) -> Curve:
        """Return the device memory in use, in bytes."""
        return [(one["step"], one["memory"]["used_bytes"]) for one in self.steps if one.get("memory")]

    def values(self) -> dict[str, Curve]:
        """Return the values that steps logged, by name."""
        return _by_name(self.steps)

    def evaluations(self) -> dict[str, Curve]:
        """Return the metrics, by name."""
        return _by_name(self.metrics)

    def as_json(self) -> dict[str, Any]:
        """Return everything except the steps."""
        return {
            "folder": self.folder,
            "outcome": self.outcome,
            "start": dict(self.start),
            "summary": dict(self.summary),
            "compiles": self.compiles,
            "findings": self.findings,
            "not_finite": self.not_finite,
            "metrics": self.metrics,
        }


def _by_name(events: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for event in events:
        for name, value in event["values"].items():
            if value is not None:
                curves.setdefault(name, []).append((event["step"], value))
    return curves
