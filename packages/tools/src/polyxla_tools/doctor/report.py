"""The findings as a table, as JSON, and as a block for an issue."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from polyxla_tools.doctor.examination import Facts
from polyxla_tools.doctor.findings import Finding, Status, counted
from polyxla_tools.doctor.host_checks import short
from polyxla_tools.doctor.packages import framework_versions
from polyxla_tools.doctor.secrets import scrubbed, scrubbed_document, shown
from polyxla_tools.doctor.trial import TrialResult
from polyxla_tools.doctor.variables import relevant

STYLES = {Status.OK: "", Status.NOTE: "yellow", Status.PROBLEM: "bold red"}
"""How a terminal shows the status."""
_WIDTH = 120
"""Width in characters where standard output is not a terminal."""
_MOST_DEVICES = 8
"""Most devices that the block lists: the others have the same names."""


def print_findings(findings: Sequence[Finding]) -> None:
    """Print the table on standard output, and its summary."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = f"{finding.found}\n→ {finding.fix}" if finding.fix else finding.found
        table.add_row(Text(finding.status, style=STYLES[finding.status]), finding.subject, text)
    width = None if sys.stdout.isatty() else _WIDTH
    # Without emoji=False, rich makes an emoji of ":100:" in a path or an error.
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    console.print(table)
    console.print(summary(findings))


def summary(findings: Sequence[Finding]) -> str:
    """Return one sentence: whether something is wrong."""
    counts = Counter(finding.status for finding in findings)
    notes = counted(counts[Status.NOTE], "note")
    if problems := counts[Status.PROBLEM]:
        return f"{counted(problems, 'problem')} and {notes}: do what follows the arrows."
    return f"0 problems and {notes}: this machine can train."


def as_json(facts: Facts, outcome: TrialResult | None, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return everything as JSON-compatible values, without secrets."""
    host, selection = facts.host, facts.runtimes.selection
    document = {
        "ok": all(finding.status is not Status.PROBLEM for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "python": facts.packages.python,
        "versions": dict(sorted(facts.packages.installed.items())),
        "system": host.system,
        "cores": host.cores,
        "memory": asdict(host.memory) if host.memory else None,
        "shared_memory": asdict(host.shared_memory) if host.shared_memory else None,
        "disks": [asdict(space) for space in host.disks],
        "chips": [asdict(chip) for chip in host.chips],
        "device_files": [asdict(file) for file in host.device_files],
        "holders": [short(holder) for holder in host.holders],
        "runtime": {"name": selection.runtime, "reason": selection.reason} if selection else None,
        "devices": [asdict(device) for device in selection.discovery.devices] if selection else [],
        "variables": _variables(facts),
        "trial": _trial(outcome),
    }
    # Scrub all of it: error texts and command lines may contain secrets in any field.
    return {name: scrubbed_document(value, facts.environ) for name, value in document.items()}


def _variables(facts: Facts) -> dict[str, str]:
    found = relevant(facts.environ, facts.runtimes)
    return {name: shown(name, value) for name, value in found.items()}


def _trial(outcome: TrialResult | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    return {
        "runtime": outcome.plan.runtime,
        "devices": outcome.plan.devices,
        "error": outcome.error,
        "first_result_s": max((replica["first_s"] for replica in outcome.replicas), default=None),
        "step_s": max((replica["step_s"] for replica in outcome.replicas), default=None),
        "replica_bytes": outcome.replica_bytes,
    }


def as_block(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return a block of Markdown to paste into an issue, without secrets."""
    host, selection = facts.host, facts.runtimes.selection
    ours = {name: version for name, version in facts.packages.installed.items() if name.startswith("polyxla")}
    memory = f", {host.memory.total / 2**30:.1f} GiB" if host.memory else ""
    lines = [
        f"python      {facts.packages.python}",
        f"frameworks  {', '.join(framework_versions(facts.packages)) or 'none'}",
        *(
            f"polyxla     {', '.join(_named(names))} {version}"
            for version, names in _by_version(ours).items()
        ),
        f"system      {host.system}, {host.cores} cores{memory}",
        f"runtime     {f'{selection.runtime}: {selection.reason}' if selection else 'none'}",
        *(
            f"device      {device.index} {device.name}, host {device.host_index}"
            for device in _devices(facts)
        ),
        *(f"variable    {name}={value}" for name, value in _variables(facts).items()),
        *(
            f"{finding.status:<11} {finding.subject}: {finding.found}"
            for finding in findings
            if finding.status is not Status.OK
        ),
        *(
            f"trial       {finding.found}"
            for finding in findings
            if finding.subject == "trial" and not finding.fix
        ),
    ]
    return f"```text\n{scrubbed(chr(10).join(lines), facts.environ)}\n```"


def _by_version(ours: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, version in sorted(ours.items()):
        found.setdefault(version, []).append(name)
    return found


def _named(names: list[str]) -> list[str]:
    return [name.removeprefix("polyxla-") for name in names]


def _devices(facts: Facts) -> list[Any]:
    selection = facts.runtimes.selection
    return list(selection.discovery.devices[:_MOST_DEVICES]) if selection else []
