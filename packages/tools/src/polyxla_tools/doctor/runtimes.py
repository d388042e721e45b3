"""The installed runtimes, the choice and its devices by the core's own rules, and the problems with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyxla import PolyxlaError
from polyxla.plugin import (
    Candidate,
    Claim,
    LaunchSettings,
    Selection,
    child_environment,
    discover_all,
    load_plugins,
    plugin_problems,
    select,
    select_devices,
    unknown_variables,
)
from polyxla_tools.doctor.findings import Finding, counted, note, ok, problem
from polyxla_tools.doctor.host import HostFacts


@dataclass(frozen=True)
class RuntimeFacts:
    """The runtimes, and what a launch would do.

    Attributes:
        candidates: every installed runtime.
        selection: the choice; None if there is none.
        error: why there is no choice, or why its devices cannot be used.
        devices: the indices that a launch would use; empty with an error.
        broken: an error text for each broken plugin that is not a runtime.
        misspelt: a warning for each variable of polyxla that does not exist.
    """

    candidates: tuple[Candidate, ...]
    selection: Selection | None
    error: PolyxlaError | None
    devices: tuple[int, ...]
    broken: tuple[str, ...]
    misspelt: tuple[str, ...]


def gather_runtimes(environ: Mapping[str, str], settings: LaunchSettings) -> RuntimeFacts:
    """Ask every runtime for its devices, and select as a launch does. No device is opened.

    Blocks for as long as the metadata server takes, at most about 2 s, and only if there are chips.

    Args:
        environ: the environment to examine.
        settings: the requested runtime and devices.
    """
    selection, error = None, None
    devices: tuple[int, ...] = ()
    try:
        selection = select(environ, settings.runtime)
        devices = select_devices(settings.devices, selection)
        check_environment(environ, selection, devices)
    except PolyxlaError as caught:
        # This catches more than UsageError: a worker that cannot be reached is a finding, too.
        error, devices = caught, ()
    return RuntimeFacts(
        # Ask all runtimes even after an error: their reasons are what the user needs then.
        candidates=discover_all(environ),
        selection=selection,
        error=error,
        devices=devices,
        broken=tuple(plugin_problems()),
        misspelt=unknown_variables(environ),
    )


def check_environment(environ: Mapping[str, str], selection: Selection, devices: tuple[int, ...]) -> None:
    """Check that a launch on these devices finds all that it needs.

    Raises:
        UsageError: it does not.
    """
    # Runtimes refuse contradicting variables when they make the environment of a launch.
    child_environment(load_plugins(selection.runtime), environ, selection, devices)


def check_choice(facts: RuntimeFacts) -> list[Finding]:
    """Check that a launch finds a runtime: otherwise a script fails without a configuration."""
    if facts.selection:
        return [ok("runtime", f"{facts.selection.runtime}: {facts.selection.reason}")]
    assert facts.error is not None
    return [_of_error("runtime", facts.error)]


def _of_error(subject: str, error: PolyxlaError) -> Finding:
    """Return an error as a problem. Errors that no user caused, such as a lost process, have no fix."""
    origin = getattr(error, "where", None)
    where = f" (from {origin})" if origin else ""
    return problem(subject, f"{getattr(error, 'what', error)}{where}", getattr(error, "fix", ""))


def check_other_runtimes(facts: RuntimeFacts) -> list[Finding]:
    """List why the other runtimes cannot run here; a broken one is a problem."""
    chosen = facts.selection.runtime if facts.selection else None
    found = []
    for candidate in facts.candidates:
        if candidate.error:
            found.append(problem("runtime", candidate.error.what, candidate.error.fix))
        elif (
            candidate.discovery
            and candidate.why_not
            and candidate.name != chosen
            # The error of the choice is a finding of its own, with the same reason.
            and candidate.why_not not in str(facts.error)
        ):
            text = f"{candidate.name} cannot run here: {candidate.why_not}"
            is_asked_for = candidate.claim is not Claim.NONE
            found.append(
                note("runtime", text, candidate.discovery.fix) if is_asked_for else ok("runtime", text)
            )
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
    notes = [
        text for candidate in facts.candidates if candidate.discovery for text in candidate.discovery.notes
    ]
    found = []
    for text in facts.selection.warnings:
        # `check_variables` and `check_other_runtimes` report these.
        if text in facts.misspelt or text.startswith("left out: "):
            continue
        # A warning is one sentence with the finding and one with the fix.
        what, _, fix = text.removesuffix(".").partition(". ")
        found.append(note("variables", text) if text in notes else problem("variables", what, f"{fix}."))
    return found


def check_devices(facts: RuntimeFacts, host: HostFacts, *, is_emulated: bool) -> list[Finding]:
    """Check that a launch gets the devices that were requested, and compare them with the attached chips.

    A program with fewer devices than its user expects fails late, when it first communicates.

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
    # Fewer may be wanted, such as in a job that shares the host. So this is not a problem.
    elif host.chips and not is_emulated and visible < len(host.chips):
        text = f"{len(host.chips)} TPU chips are attached, and programs see {counted(visible, 'device')}"
        fix = "Unset TPU_VISIBLE_CHIPS and the bounds of a process, if that is not meant."
        findings.append(note("devices", text, fix))
    return findings
