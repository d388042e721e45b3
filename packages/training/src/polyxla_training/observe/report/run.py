"""A logged run, read from its events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from polyxla import UsageError

Curve = list[tuple[float, float]]
"""Points ``(step, value)``, in the order of the steps."""


class Milestone(NamedTuple):
    """How far a run was at a step: seconds of training without pauses, and records of all replicas.

    Both are 0 if the log, that of an older release, has none.
    """

    step: int
    seconds: float
    records: float


@dataclass(frozen=True)
class LoggedRun:
    """The events of one run, by kind. A run that was resumed has several parts.

    Attributes:
        folder: the path that it was read from.
        starts: the start event of each part.
        steps: the events of every n-th step; of a step that was repeated after a resume, the last.
        compiles: the compilations.
        findings: lines that make the host wait, or leave the device idle; each once.
        metrics: means of evaluations and epochs, as for `steps`.
        not_finite: names of values that became NaN or infinite, with the step.
        end: the end event of the last part; None if it was killed, or is still running.
        summary: the run's totals; rates are those of the last part.
        milestones: the time and the records at some steps.
    """

    folder: str
    starts: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    compiles: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    not_finite: list[dict[str, Any]]
    end: Mapping[str, Any] | None
    summary: Mapping[str, Any]
    milestones: list[Milestone]

    @classmethod
    def of(cls, folder: str, events: Iterable[dict[str, Any]]) -> LoggedRun:
        """Sort the events that `polyxla_training.observe.read_run` returned.

        Raises:
            UsageError: the first is not a run's start.
        """
        parts = _parts(events)
        if not parts:
            raise UsageError("these events have no start event", where=folder, fix="Read them with read_run.")
        ends = [part["end"][-1] if "end" in part else None for part in parts]
        return cls(
            folder=folder,
            starts=[part["start"][0] for part in parts],
            steps=_kept(parts, "step"),
            compiles=[event for part in parts for event in part.get("compile", [])],
            findings=_findings(parts),
            metrics=_kept(parts, "metrics"),
            not_finite=_kept(parts, "not_finite"),
            end=ends[-1],
            summary=_total(parts, [_summary(part, end) for part, end in zip(parts, ends, strict=True)]),
            milestones=_milestones(parts),
        )

    @property
    def start(self) -> Mapping[str, Any]:
        """The start event of the last part, whose settings may differ from those before."""
        return self.starts[-1]

    @property
    def started(self) -> str:
        """When it was started, and at which steps it was resumed."""
        text = f"started {self.starts[0]['started']}"
        if steps := [str(start["step"]) for start in self.starts[1:]]:
            text += f", resumed at step{'s' * (len(steps) > 1)} {', '.join(steps)}"
        return text

    @property
    def outcome(self) -> str:
        """The end of the run, as a phrase."""
        if self.end is None:
            return "no end: it was killed, or is still running"
        error = self.end["error"]
        return f"ended by {error}" if error else "finished"

    def rate(self, name: str, scale: float = 1.0) -> Curve:
        """Return one of the rates of every n-th step; steps without it are left out."""
        return [(step["step"], step[name] * scale) for step in self.steps if step.get(name) is not None]

    def learning_rates(self) -> dict[str, Curve]:
        """Return the learning rate, or those of the groups of parameters if they differ."""
        found = [(step["step"], step["lr"]) for step in self.steps if step.get("lr")]
        if all(len(set(rates)) == 1 for _, rates in found):
            return {"learning rate": [(step, rates[0]) for step, rates in found]}
        # A hook may have added groups while the run trained.
        groups = range(max(len(rates) for _, rates in found))
        return {
            f"group {group}": [(step, rates[group]) for step, rates in found if group < len(rates)]
            for group in groups
        }

    def memory(self) -> Curve:
        """Return the device memory in use, in bytes."""
        return [(step["step"], step["memory"]["used_bytes"]) for step in self.steps if step.get("memory")]

    def values(self) -> dict[str, Curve]:
        """Return the values that steps logged, by name."""
        return _by_name(self.steps)

    def evaluations(self) -> dict[str, Curve]:
        """Return the metrics, by name."""
        return _by_name(self.metrics)

    def all_values(self) -> dict[str, Curve]:
        """Return both, by name; an epoch's mean of a value that steps logged too is named so."""
        steps = self.values()
        means = self.evaluations().items()
        return steps | {f"{name} (epoch)" if name in steps else name: curve for name, curve in means}

    def as_json(self) -> dict[str, Any]:
        """Return everything except the steps."""
        return {
            "folder": self.folder,
            "outcome": self.outcome,
            "start": dict(self.start),
            "resumed_at": [start["step"] for start in self.starts[1:]],
            "summary": dict(self.summary),
            "compiles": self.compiles,
            "findings": self.findings,
            "not_finite": self.not_finite,
            "metrics": self.metrics,
        }


_Part = dict[str, list[dict[str, Any]]]
"""The events of one part of a run, by kind."""
_SUMS = ("seconds", "compiles", "compile_s", "unexpected", "cache_hits", "cache_misses")


def _parts(events: Iterable[dict[str, Any]]) -> list[_Part]:
    parts: list[_Part] = []
    for event in events:
        kind = str(event.get("event"))
        # Each resumed run appends to the same file, and begins with a start event.
        if kind == "start":
            parts.append({})
        if parts:
            parts[-1].setdefault(kind, []).append(event)
    return parts


def _kept(parts: list[_Part], kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind, without those of steps that a later part has repeated."""
    kept: list[dict[str, Any]] = []
    for part in parts:
        begin = _begin(part)
        # A run that crashed after its checkpoint had logged steps that the resumed part makes again.
        kept = [event for event in kept if event["step"] <= begin] + part.get(kind, [])
    return kept


def _summary(part: _Part, end: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a part's totals; without an end event, the sums of its events."""
    # Only a run that was killed has no end event.
    if end is not None:
        summary: Mapping[str, Any] = end["summary"]
        return summary
    compiles, begin = part.get("compile", []), _begin(part)
    last = part["step"][-1] if "step" in part else {}
    elapsed = {"seconds": last["time"] - part["start"][0]["time"]} if "time" in last else {}
    return {
        **elapsed,
        "steps": last.get("step", begin) - begin,
        "compiles": sum(event["compiles"] for event in compiles),
        "compile_s": sum(event["seconds"] for event in compiles),
        "unexpected": sum(event["compiles"] for event in compiles if not event["expected"]),
        **{name: last.get(name) for name in ("step_s", "records_per_s", "wait_share", "mfu")},
    }


def _findings(parts: list[_Part]) -> list[dict[str, Any]]:
    # Keyed by line, because a resumed part finds the same lines again.
    found = (event for part in parts for event in part.get("finding", []))
    return list({(finding["kind"], finding["op"], finding["line"]): finding for finding in found}.values())


def _total(parts: list[_Part], summaries: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    sums = {
        name: sum(summary[name] for summary in summaries if summary.get(name) is not None)
        for name in _SUMS
        if any(summary.get(name) is not None for summary in summaries)
    }
    # The steps are not summed, because those that a resumed part has repeated count once.
    return {**summaries[-1], **sums, "steps": _begin(parts[-1]) + summaries[-1].get("steps", 0)}


def _begin(part: _Part) -> int:
    """Return the step that a part began at: 0, or that of the checkpoint."""
    return part["start"][0].get("step") or 0


def _milestones(parts: list[_Part]) -> list[Milestone]:
    """Return how far the run was at the steps that were logged, and at the start of each part."""
    found: list[Milestone] = []
    for part in parts:
        begin = _begin(part)
        # A resumed part continues from where the run was at its checkpoint, not where it crashed.
        seconds, records = progress_at(found, begin)
        found = [milestone for milestone in found if milestone.step < begin]
        found.append(Milestone(begin, seconds, records))
        started = part["start"][0].get("time", 0.0)
        for event in part.get("step", []):
            elapsed = event["time"] - started if "time" in event else 0.0
            found.append(Milestone(event["step"], seconds + elapsed, records + (event.get("records") or 0.0)))
    return found


def progress_at(milestones: list[Milestone], step: float) -> tuple[float, float]:
    """Return the seconds and the records at a step, on the line between the two milestones around it."""
    if len(milestones) < 2:
        return (milestones[0].seconds, milestones[0].records) if milestones else (0.0, 0.0)
    # Beyond the last milestone, the run is taken to be as fast as just before it.
    index = min(max(bisect_right(milestones, step, key=attrgetter("step")), 1), len(milestones) - 1)
    first, last = milestones[index - 1], milestones[index]
    share = (step - first.step) / (last.step - first.step)
    return (
        first.seconds + share * (last.seconds - first.seconds),
        first.records + share * (last.records - first.records),
    )


def _by_name(events: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for event in events:
        for name, value in event["values"].items():
            if value is not None:
                curves.setdefault(name, []).append((event["step"], value))
    return curves
