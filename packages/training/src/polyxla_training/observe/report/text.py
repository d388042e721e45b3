"""The report's text, for the terminal and for the page: one run, or several side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from polyxla import UsageError
from polyxla_training.checkpoint.errors import size_text
from polyxla_training.observe.performance import in_seconds
from polyxla_training.observe.report.run import LoggedRun
from polyxla_training.observe.slow_lines import SlowLine

MAX_COMPILES = 20
"""Number of compilations that the terminal shows; the page shows them all."""


def facts(run: LoggedRun) -> dict[str, str]:
    """Return the run's figures by name; unknown ones are left out."""
    summary = run.summary
    shown = {
        "steps": _of(summary, "steps", "{:,}"),
        "time": _of(summary, "seconds", "{:.1f} s"),
        "step time": _of(summary, "step_s", "{:.3g} ms (median)", 1e3),
        "throughput": _throughput(summary),
        "waiting for input": _of(summary, "wait_share", "{:.1%} of the time"),
        "programs compiled": _compiled(summary),
        "program cache": _cache(summary),
        "reads of the device": _of(summary, "reads_per_step", "{:.3g} a step"),
        "on the host": ", ".join(f"{name} x{count}" for name, count in summary.get("fallbacks", {}).items()),
        "device memory": size_text(summary["peak_bytes"]) if summary.get("peak_bytes") else "",
        # Said rather than left out: users look for it, and a CPU has no peak to compare with.
        "MFU": _of(summary, "mfu", "{:.1%}") or "not available: the chip is unknown",
    }
    return {name: text for name, text in shown.items() if text}


def _of(summary: Mapping[str, Any], name: str, form: str, scale: float | None = None) -> str:
    value = summary.get(name)
    return "" if value is None else form.format(value if scale is None else value * scale)


def _throughput(summary: Mapping[str, Any]) -> str:
    rate = summary.get("records_per_s")
    return _of(summary, "records_per_s", "{:,.0f} records/s" if rate and rate >= 1000 else "{:.4g} records/s")


def _compiled(summary: Mapping[str, Any]) -> str:
    took = in_seconds(summary["compile_s"], ".1f")
    return f"{summary['compiles']}{took}, {summary['unexpected']} unexpected"


def _cache(summary: Mapping[str, Any]) -> str:
    hits, misses = summary.get("cache_hits", 0), summary.get("cache_misses", 0)
    return f"{hits} hits, {misses} misses" if hits or misses else ""


def title(run: LoggedRun) -> str:
    """Return the module, the replicas, the device and the runtime."""
    start = run.start
    replicas = f"{start['world_size']} replica{'s' * (start['world_size'] > 1)}"
    return f"{start.get('module', 'a loop')} on {replicas} of {start['device']} ({start['runtime']})"


def findings(run: LoggedRun) -> list[str]:
    """Return a sentence for each line that makes the host wait, and for each value that is not finite."""
    sentences = [
        SlowLine(finding["kind"], finding["op"], finding["line"]).describe(finding["count"])
        for finding in run.findings
    ]
    return sentences + [
        f"{event['name']} is not finite from step {event['step']} on" for event in run.not_finite
    ]


def as_lines(run: LoggedRun) -> Iterator[str]:
    """Return the run as lines for a terminal."""
    yield f"{title(run)}, {run.started}: {run.outcome}"
    shown = facts(run)
    # Aligned by hand: rich would wrap at the width of a terminal, which a pipe does not have.
    width = max(map(len, shown))
    yield from (f"  {name:<{width}}  {text}" for name, text in shown.items())
    last = {name: curve[-1][1] for name, curve in run.all_values().items()}
    if last:
        yield "last values: " + "  ".join(f"{name} {value:.4g}" for name, value in last.items())
    if found := findings(run):
        yield "findings:"
        yield from (f"  {text}" for text in found)
    if run.compiles:
        yield "compilations:"
        yield from (f"  {compilation(event)}" for event in run.compiles[:MAX_COMPILES])
    if len(run.compiles) > MAX_COMPILES:
        yield f"  and {len(run.compiles) - MAX_COMPILES} more"


def compilation(event: Mapping[str, Any]) -> str:
    """Return a line about one compilation."""
    at = f" ({event['line']})" if event["line"] else ""
    took = in_seconds(event["seconds"], ".2g")
    return f"step {event['step']}: {event['compiles']}{took}, {event['cause']}{at}"


MAX_RUNS = 6
"""The number of the plots' colours: runs of one colour could not be distinguished."""


@dataclass(frozen=True)
class Row:
    """One line of a comparison.

    Attributes:
        name: what is compared.
        values: one for each run; empty where a run has none.
    """

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the runs do not all agree."""
        return len(set(self.values)) > 1


@dataclass(frozen=True)
class Comparison:
    """Runs, by short names that tell them apart.

    Raises:
        UsageError: fewer than two runs, or more than `MAX_RUNS`.
    """

    runs: Mapping[str, LoggedRun]

    @classmethod
    def of(cls, runs: Sequence[LoggedRun]) -> Comparison:
        """Name the runs by the parts of their paths that differ."""
        if not 2 <= len(runs) <= MAX_RUNS:
            raise UsageError(
                f"a comparison is of 2 to {MAX_RUNS} runs, not {len(runs)}",
                where="polyxla report --compare",
                fix="Name the runs by their log_dirs: polyxla report --compare runs/a runs/b.",
            )
        return cls(dict(zip(short_names([run.folder for run in runs]), runs, strict=True)))

    def results(self) -> list[Row]:
        """Return the figures of the runs, and the last value of each metric."""
        return self._rows(_results)

    def settings(self) -> list[Row]:
        """Return the settings, hyper-parameters, releases and sources of the runs."""
        return self._rows(origin)

    def as_json(self) -> dict[str, Any]:
        """Return the runs, and the settings in which they differ."""
        return {
            "runs": {name: run.as_json() for name, run in self.runs.items()},
            "differences": {
                row.name: dict(zip(self.runs, row.values, strict=True))
                for row in self.settings()
                if row.differs
            },
        }

    def as_lines(self) -> Iterator[str]:
        """Return the results and the differing settings as a table for a terminal."""
        rows = [Row("", tuple(self.runs)), *self.results(), *(row for row in self.settings() if row.differs)]
        widths = [
            max(map(len, column)) for column in zip(*((row.name, *row.values) for row in rows), strict=True)
        ]
        for row in rows:
            cells = zip((row.name, *row.values), widths, strict=True)
            yield "  ".join(f"{cell:<{width}}" for cell, width in cells).rstrip()

    def _rows(self, of: Callable[[LoggedRun], dict[str, str]]) -> list[Row]:
        columns = [of(run) for run in self.runs.values()]
        # Rows keep the order in which the first run has them; names of later runs follow.
        names = dict.fromkeys(name for column in columns for name in column)
        return [Row(name, tuple(column.get(name, "") for column in columns)) for name in names]


def _results(run: LoggedRun) -> dict[str, str]:
    last = {name: f"{curve[-1][1]:.4g}" for name, curve in run.all_values().items()}
    return {"outcome": run.outcome, **facts(run), **last}


def origin(run: LoggedRun) -> dict[str, str]:
    """Return a run's settings, hyper-parameters, releases and source, by name."""
    start = run.start
    found = {
        "module": start.get("module"),
        "replicas": start["world_size"],
        "device": start["device"],
        "runtime": start["runtime"],
        **(start.get("settings") or {}),
        **{f"hparams.{name}": value for name, value in (start.get("hyper_parameters") or {}).items()},
        **{name: start.get(name) for name in ("command", "directory", "host", "system")},
        "git commit": git_text(start.get("git")),
        **(start.get("versions") or {"polyxla_core": start["polyxla"]}),
    }
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


def git_text(git: Mapping[str, Any] | None) -> str:
    """Return a commit as a phrase, such as ``1a2b3c4d5e on main, 2 files changed``."""
    if not git:
        return ""
    changed = git["changed_files"]
    ending = f", {changed} file{'s' * (changed > 1)} changed" if changed else ""
    return f"{git['commit'][:10]} on {git['branch']}{ending}"


def short_names(folders: Iterable[str]) -> list[str]:
    """Return each path without the parts that all share; the same path twice is numbered."""
    parts = [PurePath(folder).parts for folder in folders]
    shared_start = _shared(parts)
    parts = [path[shared_start:] for path in parts]
    # From the end too: runs are often called runs/A/logs and runs/B/logs.
    shared_end = _shared([path[::-1] for path in parts])
    names = ["/".join(path[: len(path) - shared_end]) or "/".join(path) or "." for path in parts]
    counts: dict[str, int] = {}
    for index, name in enumerate(names):
        counts[name] = counts.get(name, 0) + 1
        # The same directory may be compared with itself at two times.
        if counts[name] > 1:
            names[index] = f"{name} ({counts[name]})"
    return names


def _shared(paths: Sequence[Sequence[str]]) -> int:
    """Return how many first parts all paths have in common."""
    count = 0
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        count += 1
    return count
