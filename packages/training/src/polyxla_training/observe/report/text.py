"""A run in the words of a person, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyxla_training.observe.findings import Finding
from polyxla_training.observe.report.run import Run

MOST_COMPILES = 20
"""Compilations that the terminal shows; the page shows them all."""


def facts(run: Run) -> dict[str, str]:
    """Return the run's figures by name; what nobody could tell is left out."""
    told = run.summary
    shown = {
        "steps": _of(told, "steps", "{:,}"),
        "time": _of(told, "seconds", "{:.1f} s"),
        "step time": _of(told, "step_s", "{:.3g} ms (median)", 1e3),
        "throughput": _of(told, "records_per_s", "{:,.4g} records/s"),
        "waiting for input": _of(told, "wait_share", "{:.1%} of the time"),
        "programs compiled": _compiled(told),
        "program cache": _cache(told),
        "reads of the device": _of(told, "reads_per_step", "{:.3g} a step"),
        "on the host": ", ".join(f"{name} x{count}" for name, count in told.get("fallbacks", {}).items()),
        "device memory": _of(told, "peak_bytes", "{:.3g} GiB", 2**-30),
        "MFU": _of(told, "mfu", "{:.1%}") or "not told: the chip is unknown",
    }
    return {name: text for name, text in shown.items() if text}


def _of(told: Mapping[str, Any], name: str, form: str, scale: float | None = None) -> str:
    value = told.get(name)
    return "" if value is None else form.format(value if scale is None else value * scale)


def _compiled(told: Mapping[str, Any]) -> str:
    return f"{told['compiles']} in {told['compile_s']:.1f} s, {told['unexpected']} after the first"


def _cache(told: Mapping[str, Any]) -> str:
    hits, misses = told.get("cache_hits", 0), told.get("cache_misses", 0)
    return f"{hits} hits, {misses} misses" if hits or misses else ""


def title(run: Run) -> str:
    """Return what was trained, on what."""
    start = run.start
    replicas = f"{start['world_size']} replica{'s' * (start['world_size'] > 1)}"
    return f"{start.get('module', 'a loop')} on {replicas} of {start['device']} ({start['runtime']})"


def findings(run: Run) -> list[str]:
    """Return a sentence for each line that makes the host wait, and each value that is no number."""
    said = [Finding(one["kind"], one["op"], one["line"]).said(one["count"]) for one in run.findings]
    return said + [f"{one['name']} is no finite number from step {one['step']} on" for one in run.not_finite]


def as_lines(run: Run) -> Iterator[str]:
    """Return the run as lines for a terminal."""
    yield f"{title(run)}, begun {run.start['started']}: {run.outcome}"
    shown = facts(run)
    width = max(map(len, shown))
    yield from (f"  {name:<{width}}  {text}" for name, text in shown.items())
    last = {name: curve[-1][1] for name, curve in (run.values() | run.evaluations()).items()}
    if last:
        yield "last values: " + "  ".join(f"{name} {value:.4g}" for name, value in last.items())
    if found := findings(run):
        yield "found:"
        yield from (f"  {text}" for text in found)
    if run.compiles:
        yield "compiled:"
        yield from (f"  {compiled(one)}" for one in run.compiles[:MOST_COMPILES])
    if len(run.compiles) > MOST_COMPILES:
        yield f"  and {len(run.compiles) - MOST_COMPILES} times more"


def compiled(one: Mapping[str, Any]) -> str:
    """Return a compilation in a line."""
    at = f" ({one['line']})" if one["line"] else ""
    return f"step {one['step']}: {one['compiles']} in {one['seconds']:.2g} s, {one['cause']}{at}"
