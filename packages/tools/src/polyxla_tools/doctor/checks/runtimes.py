"""The choice of the runtime, its devices, and what plugins report."""

from __future__ import annotations

from polyxla import PolyxlaError
from polyxla.plugin import Claim
from polyxla_tools.doctor.facts.host import HostFacts
from polyxla_tools.doctor.facts.runtimes import RuntimeFacts
from polyxla_tools.doctor.findings import Finding, counted, note, ok, problem


def check_choice(facts: RuntimeFacts) -> list[Finding]:
    """Check that a launch finds a runtime: otherwise a script fails without a configuration."""
    if facts.selection:
        return [ok("runtime", f"{facts.selection.runtime}: {facts.selection.reason}")]
    assert facts.error is not None
    return [_of_error("runtime", facts.error)]


def _of_error(subject: str, error: PolyxlaError) -> Finding:
    """Return an error as a problem; one that is not the caller's, as of a lost process, may have no fix."""
    origin = getattr(error, "where", None)
    where = f" (from {origin})" if origin else ""
    return problem(subject, f"{getattr(error, 'what', error)}{where}", getattr(error, "fix", ""))


def check_other_runtimes(facts: RuntimeFacts) -> list[Finding]:
    """List why the other runtimes cannot run here; a broken one is a problem."""
    chosen = facts.selection.runtime if facts.selection else None
    found = []
    for one in facts.candidates:
        if one.error:
            found.append(problem("runtime", one.error.what, one.error.fix))
        elif one.discovery and one.why_not and one.name != chosen and one.why_not not in str(facts.error):
            text = f"{one.name} cannot run here: {one.why_not}"
            is_asked_for = one.claim is not Claim.NONE
            found.append(note("runtime", text, one.discovery.fix) if is_asked_for else ok("runtime", text))
    return found


def check_plugins(facts: RuntimeFacts) -> list[Finding]:
    """Report the plugins that are installed and broken."""
    return [
        problem("plugins", text, "Without it polyxla runs, and what it provides is missing.")
        for text in facts.broken
    ]


def check_conflicts(facts: RuntimeFacts) -> list[Finding]:
    """Report variables that contradict each other, and those that the runtimes say have no effect."""
    if not facts.selection:
        return []
    notes = [text for one in facts.candidates if one.discovery for text in one.discovery.notes]
    found = []
    for text in facts.selection.warnings:
        # These have checks of their own.
        if text in facts.misspelt or text.startswith("left out: "):
            continue
        what, _, fix = text.removesuffix(".").partition(". ")
        found.append(note("variables", text) if text in notes else problem("variables", what, f"{fix}."))
    return found


def check_devices(facts: RuntimeFacts, host: HostFacts, *, is_emulated: bool) -> list[Finding]:
    """Check that a launch gets the devices that were requested, and compare them with the attached chips.

    A program that has one device where its user expects eight fails late, when it first communicates.

    Args:
        facts: the runtimes.
        host: this machine, with its chips.
        is_emulated: whether the TPU is emulated, so that chips do not count.
    """
    if not facts.selection:
        return []
    if facts.error:
        return [_of_error("devices", facts.error)]
    found = facts.selection.discovery
    visible = len(found.devices)
    slice_ = f" of a {found.topology}" if found.topology else ""
    more = f", with {counted(found.host_count, 'host')}" if found.host_count > 1 else ""
    text = f"{counted(visible, f'{found.kind} device')}{slice_}{more}; a launch uses {len(facts.devices)}"
    findings = [ok("devices", text)]
    if host.chips and not is_emulated and found.kind != "TPU":
        text = f"runtime {facts.selection.runtime} does not use the TPU chips of this machine"
        findings.append(note("devices", text, "Unset what asks for another device: `polyxla env` lists it."))
    elif host.chips and not is_emulated and visible < len(host.chips):
        text = f"{len(host.chips)} TPU chips are attached, and programs see {counted(visible, 'device')}"
        fix = "Unset TPU_VISIBLE_CHIPS and the bounds of a process, if that is not meant."
        findings.append(note("devices", text, fix))
    return findings
