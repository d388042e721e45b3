"""Choosing the runtime: one place, one rule, every choice with its reason.

The first that applies: the runtime a person named; the one strongest claim of the environment
(`polyxla.contracts.discovery.Claim`). What a claim rests on is each runtime's own business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyxla.contracts.discovery import Claim, Discovery
from polyxla.env import POLYXLA_RUNTIME, Setting
from polyxla.errors import BrokenPluginError, RuntimeUnavailableError
from polyxla.plugins.manager import KNOWN_RUNTIMES, RuntimeEntry, find_runtime, load_runtime, runtime_entries


@dataclass(frozen=True)
class Candidate:
    """One installed runtime and what it found, or the error that kept it from looking."""

    entry: RuntimeEntry
    discovery: Discovery | None = None
    error: BrokenPluginError | None = None

    @property
    def name(self) -> str:
        """The runtime's name."""
        return self.entry.name

    @property
    def why_not(self) -> str | None:
        """Why nothing can run on it; None where it can."""
        if self.discovery is None:
            return str(self.error)
        return self.discovery.unavailable

    @property
    def claim(self) -> Claim:
        """How strongly the environment speaks for it."""
        return self.discovery.claim if self.discovery else Claim.NONE


@dataclass(frozen=True)
class Selection:
    """The chosen runtime and why.

    Attributes:
        runtime: its name.
        reason: what decided, in a few words.
        discovery: what it sees here.
        implicit: whether nobody named it, so that it should be said aloud.
        warnings: conflicts that a person should know of.
    """

    runtime: str
    reason: str
    discovery: Discovery
    implicit: bool = False
    warnings: tuple[str, ...] = ()


def discover_all(environ: Mapping[str, str], accelerator: str = "auto") -> tuple[Candidate, ...]:
    """Ask every installed runtime what it sees; a broken one is reported, never raised."""
    return tuple(discover(entry, environ, accelerator) for entry in runtime_entries().values())


def discover(entry: RuntimeEntry, environ: Mapping[str, str], accelerator: str) -> Candidate:
    """Import one runtime alone and ask it what it sees."""
    try:
        manager = load_runtime(entry)
    except BrokenPluginError as error:
        return Candidate(entry, error=error)
    try:
        found = manager.hook.polyxla_discover_devices(environ=environ, accelerator=accelerator)
    except Exception as error:
        return Candidate(entry, error=_failed(entry, error))
    if not found:
        reason = f"runtime {entry.name!r} does not implement polyxla_discover_devices"
        broken = BrokenPluginError(reason, where=entry.distribution, fix="Implement the hook.")
        return Candidate(entry, error=broken)
    return Candidate(entry, found[0])


def _failed(entry: RuntimeEntry, error: Exception) -> BrokenPluginError:
    return BrokenPluginError(
        f"runtime {entry.name!r} failed to look for devices: {type(error).__name__}: {error}",
        where=entry.distribution,
        fix="Report it to its authors: a wrong setting is to be said, not raised.",
    )


def select(environ: Mapping[str, str], runtime: Setting, accelerator: str = "auto") -> Selection:
    """Choose the runtime for this environment.

    Args:
        environ: the environment to judge by.
        runtime: the name a person asked for, with its origin; its value None lets the environment choose.
        accelerator: ``"auto"`` or the kind of device that is asked for.

    Raises:
        UsageError: the runtime that is asked for, or that the environment asks for, cannot be used.
    """
    if runtime.value is not None:
        candidate = discover(find_runtime(runtime.value, runtime.origin), environ, accelerator)
        discovery = _usable(candidate, runtime.origin)
        return Selection(candidate.name, runtime.origin, discovery, warnings=discovery.notes)
    return choose(discover_all(environ, accelerator), environ)


def choose(candidates: Sequence[Candidate], environ: Mapping[str, str]) -> Selection:
    """Choose among surveyed runtimes by their claims.

    Raises:
        UsageError: none claims this environment, several claim it alike, or the winner cannot be used.
    """
    missed = _missed(candidates, environ)
    ranked = sorted(candidates, key=lambda candidate: -candidate.claim)
    if not ranked or ranked[0].claim < Claim.EXPLICIT:
        _refuse_missed(missed, candidates)
    if not ranked or ranked[0].claim is Claim.NONE:
        raise _nobody(candidates)
    winner, others = ranked[0], ranked[1:]
    if others and others[0].claim is winner.claim:
        raise _tie(winner, others[0])
    # What made a fallback is nothing that a person set.
    discovery = _usable(winner, _reason(winner) if winner.claim >= Claim.CONFIGURED else None)
    return Selection(
        runtime=winner.name,
        reason=discovery.reason,
        discovery=discovery,
        implicit=winner.claim < Claim.CONFIGURED,
        warnings=_warnings(winner, others, missed),
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


def _missed(candidates: Sequence[Candidate], environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the known runtimes that a variable asks for and that are missing or broken."""
    working = {candidate.name for candidate in candidates if not candidate.error}
    return {
        name: Setting(environ[variable], f"{variable}={environ[variable]}")
        for name, known in KNOWN_RUNTIMES.items()
        for variable in known.variables
        if environ.get(variable) and name not in working
    }


def _refuse_missed(missed: Mapping[str, Setting], candidates: Sequence[Candidate]) -> None:
    """Never train elsewhere in silence when the runtime that is asked for is missing or broken."""
    for name, asked in missed.items():
        find_runtime(name, asked.origin)
        raise next(one.error for one in candidates if one.name == name and one.error)


def _reason(candidate: Candidate) -> str:
    return candidate.discovery.reason if candidate.discovery else ""


def _nobody(candidates: Sequence[Candidate]) -> RuntimeUnavailableError:
    seen = "; ".join(f"{one.name}: {one.why_not or 'not asked for'}" for one in candidates)
    return RuntimeUnavailableError(
        f"no runtime can be chosen ({seen or 'none is installed'})",
        fix="Install one, such as: pip install polyxla-runtime-pjrt"
        if not candidates
        else f"Name one with --runtime or {POLYXLA_RUNTIME}.",
    )


def _tie(one: Candidate, other: Candidate) -> RuntimeUnavailableError:
    return RuntimeUnavailableError(
        f"runtimes {one.name!r} ({_reason(one)}) and {other.name!r} ({_reason(other)}) "
        "claim this environment alike",
        fix=f"Name one with --runtime or {POLYXLA_RUNTIME}.",
    )


def _warnings(
    winner: Candidate, others: Sequence[Candidate], missed: Mapping[str, Setting]
) -> tuple[str, ...]:
    rivals = {one.name: _reason(one) for one in others if one.claim >= Claim.CONFIGURED}
    rivals |= {name: asked.origin for name, asked in missed.items()}
    conflicts = [
        f"{reason} asks for runtime {name!r} and {_reason(winner)} for {winner.name!r}: "
        f"{winner.name!r} wins. Unset one of them, or name a runtime with --runtime."
        for name, reason in rivals.items()
    ]
    broken = [f"left out: {other.error}" for other in others if other.error]
    # A runtime that nothing asks for may know why: a misspelt variable is set for nothing.
    silent = [one for one in others if one.claim is Claim.NONE]
    notes = [note for one in (winner, *silent) if one.discovery for note in one.discovery.notes]
    return (*conflicts, *broken, *notes)
