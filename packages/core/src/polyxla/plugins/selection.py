"""Choosing the runtime. No other module does.

The runtime that the user named is used. If the user named none, the strongest
`polyxla.contracts.discovery.Claim` wins; each runtime decides what it claims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polyxla.contracts.discovery import Claim, Discovery
from polyxla.env import POLYXLA_RUNTIME, Setting
from polyxla.errors import BrokenPluginError, RuntimeUnavailableError, pip_install
from polyxla.plugins.manager import ASKING, RuntimeEntry, find_runtime, load_runtime, runtime_entries
from polyxla.plugins.unknown_variables import unknown_variables


@dataclass(frozen=True)
class Candidate:
    """An installed runtime with its discovery, or with the error that prevented it."""

    entry: RuntimeEntry
    discovery: Discovery | None = None
    error: BrokenPluginError | None = None

    @property
    def name(self) -> str:
        """The runtime's name."""
        return self.entry.name

    @property
    def why_not(self) -> str | None:
        """Why it cannot run here; None if it can."""
        if self.discovery is None:
            return str(self.error)
        return self.discovery.unavailable

    @property
    def claim(self) -> Claim:
        """How strongly the environment asks for it."""
        return self.discovery.claim if self.discovery else Claim.NONE


@dataclass(frozen=True)
class Selection:
    """The chosen runtime and the reason for the choice.

    Attributes:
        runtime: the runtime's name.
        reason: why it was chosen, in a few words.
        discovery: the runtime's discovery.
        implicit: whether no setting of the user's asked for it, so that the choice should be printed.
        warnings: conflicts and notes to print.
    """

    runtime: str
    reason: str
    discovery: Discovery
    implicit: bool = False
    warnings: tuple[str, ...] = ()


def discover_all(environ: Mapping[str, str], accelerator: str = "auto") -> tuple[Candidate, ...]:
    """Run the discovery of every installed runtime; a broken runtime becomes a candidate with an error."""
    return tuple(discover(entry, environ, accelerator) for entry in runtime_entries().values())


def discover(entry: RuntimeEntry, environ: Mapping[str, str], accelerator: str) -> Candidate:
    """Load one runtime and run its discovery; a broken runtime becomes a candidate with an error."""
    try:
        manager = load_runtime(entry)
    except BrokenPluginError as error:
        return Candidate(entry, error=error)
    try:
        found = manager.hook.polyxla_discover_devices(environ=environ, accelerator=accelerator)
    except Exception as error:
        failed = BrokenPluginError(
            f"runtime {entry.name!r} failed to discover devices: {type(error).__name__}: {error}",
            where=entry.distribution,
            fix="Report it to its authors: polyxla_discover_devices must return `unavailable`, not raise.",
        )
        return Candidate(entry, error=failed)
    if not found:
        problem = f"runtime {entry.name!r} does not implement polyxla_discover_devices"
        broken = BrokenPluginError(problem, where=entry.distribution, fix="Implement the hook.")
        return Candidate(entry, error=broken)
    return Candidate(entry, found[0])


def select(environ: Mapping[str, str], runtime: Setting, accelerator: str = "auto") -> Selection:
    """Choose the runtime for this environment.

    Args:
        environ: the environment to examine.
        runtime: the requested runtime's name, with its origin; with the value None the environment chooses.
        accelerator: ``"auto"`` or the requested kind of device.

    Raises:
        UsageError: the runtime that the user or the environment asks for cannot be used.
    """
    if runtime.value is not None:
        candidate = discover(find_runtime(runtime.value, runtime.origin), environ, accelerator)
        discovery = _usable(candidate, runtime.origin)
        chosen = Selection(candidate.name, runtime.origin, discovery, warnings=discovery.notes)
    else:
        chosen = choose(discover_all(environ, accelerator), environ)
    unknown = unknown_variables(environ)
    return replace(chosen, warnings=(*chosen.warnings, *unknown)) if unknown else chosen


def choose(candidates: Sequence[Candidate], environ: Mapping[str, str]) -> Selection:
    """Choose among the candidates by their claims.

    Raises:
        UsageError: no candidate claims this environment, the strongest claim is not unique, or the winner
            cannot be used.
    """
    missing = _find_missing(candidates, environ)
    ranked = sorted(candidates, key=lambda candidate: -candidate.claim)
    if not ranked or ranked[0].claim < Claim.EXPLICIT:
        _check_missing(missing, candidates)
    if not ranked or ranked[0].claim is Claim.NONE:
        raise _no_claim(candidates)
    winner, others = ranked[0], ranked[1:]
    if others and others[0].claim is winner.claim:
        raise _equal_claims(winner, others[0])
    # The user set nothing that an error could name as the origin of a fallback.
    discovery = _usable(winner, _reason(winner) if winner.claim >= Claim.CONFIGURED else None)
    return Selection(
        runtime=winner.name,
        reason=discovery.reason,
        discovery=discovery,
        implicit=winner.claim < Claim.CONFIGURED,
        warnings=_warnings(winner, others, missing),
    )


def _usable(candidate: Candidate, origin: str | None) -> Discovery:
    if candidate.error:
        raise candidate.error
    discovery = candidate.discovery
    assert discovery is not None
    if discovery.unavailable:
        raise RuntimeUnavailableError(
            f"runtime {candidate.name!r} cannot run here: {discovery.unavailable}",
            where=origin,
            fix=discovery.fix,
        )
    return discovery


def _find_missing(candidates: Sequence[Candidate], environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the known runtimes that a variable asks for but that are missing or broken."""
    working = {candidate.name for candidate in candidates if not candidate.error}
    return {
        name: Setting(environ[variable], f"{variable}={environ[variable]}")
        for variable, name in ASKING.items()
        if environ.get(variable) and name not in working
    }


def _check_missing(missing: Mapping[str, Setting], candidates: Sequence[Candidate]) -> None:
    """Raise the error of a missing or broken runtime that a variable asks for.

    Otherwise the program would silently train on another runtime.
    """
    for name, asked in missing.items():
        find_runtime(name, asked.origin)
        raise next(one.error for one in candidates if one.name == name and one.error)


def _reason(candidate: Candidate) -> str:
    return candidate.discovery.reason if candidate.discovery else ""


def _no_claim(candidates: Sequence[Candidate]) -> RuntimeUnavailableError:
    seen = "; ".join(f"{one.name}: {one.why_not or 'not asked for'}" for one in candidates)
    return RuntimeUnavailableError(
        f"no runtime can be chosen ({seen or 'none is installed'})",
        fix=f"Install one, such as: {pip_install('polyxla-runtime-pjrt')}"
        if not candidates
        else f"Name one with --runtime or {POLYXLA_RUNTIME}.",
    )


def _equal_claims(one: Candidate, other: Candidate) -> RuntimeUnavailableError:
    return RuntimeUnavailableError(
        f"runtimes {one.name!r} ({_reason(one)}) and {other.name!r} ({_reason(other)}) "
        "claim this environment equally",
        fix=f"Name one with --runtime or {POLYXLA_RUNTIME}.",
    )


def _warnings(
    winner: Candidate, others: Sequence[Candidate], missing: Mapping[str, Setting]
) -> tuple[str, ...]:
    rivals = {one.name: _reason(one) for one in others if one.claim >= Claim.CONFIGURED}
    rivals |= {name: asked.origin for name, asked in missing.items()}
    conflicts = [
        f"{reason} asks for runtime {name!r} and {_reason(winner)} for {winner.name!r}: "
        f"{winner.name!r} wins. Unset one of them, or name a runtime with --runtime."
        for name, reason in rivals.items()
    ]
    broken = [f"left out: {other.error}" for other in others if other.error]
    # A runtime that nothing asks for, or that cannot run, may know the reason, such as a misspelt variable.
    unused = [one for one in others if one.claim is Claim.NONE or one.why_not]
    notes = [note for one in (winner, *unused) if one.discovery for note in one.discovery.notes]
    return (*conflicts, *broken, *notes)
