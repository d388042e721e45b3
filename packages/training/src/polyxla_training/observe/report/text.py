"""The report's text, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyxla_training.checkpoint.errors import size_text
from polyxla_training.observe.report.run import Run
from polyxla_training.observe.summary import in_seconds
from polyxla_training.observe.tracing.findings import Finding

MAX_COMPILES = 20
"""Number of compilations that the terminal shows; the page shows them all."""


def facts(run: Run) -> dict[str, str]:
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


def title(run: Run) -> str:
    """Return the module, the replicas, the device and the runtime."""
    start = run.start
    replicas = f"{start['world_size']} replica{'s' * (start['world_size'] > 1)}"
    return f"{start.get('module', 'a loop')} on {replicas} of {start['device']} ({start['runtime']})"


def findings(run: Run) -> list[str]:
    """Return a sentence for each line that makes the host wait, and for each value that is not finite."""
    sentences = [Finding(one["kind"], one["op"], one["line"]).describe(one["count"]) for one in run.findings]
    return sentences + [f"{one['name']} is not finite from step {one['step']} on" for one in run.not_finite]


def as_lines(run: Run) -> Iterator[str]:
    """Return the run as lines for a terminal."""
    yield f"{title(run)}, {run.started}: {run.outcome}"
    shown = facts(run)
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
        yield from (f"  {compilation(one)}" for one in run.compiles[:MAX_COMPILES])
    if len(run.compiles) > MAX_COMPILES:
        yield f"  and {len(run.compiles) - MAX_COMPILES} more"


def compilation(one: Mapping[str, Any]) -> str:
    """Return a line about one compilation."""
    at = f" ({one['line']})" if one["line"] else ""
    took = in_seconds(one["seconds"], ".2g")
    return f"step {one['step']}: {one['compiles']}{took}, {one['cause']}{at}"
