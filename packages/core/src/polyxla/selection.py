"""Choosing the runtime, its devices and the precision policy. No other module does.

The runtime that the user named is used. If the user named none, the strongest
`polyxla.contracts.discovery.Claim` wins; each runtime decides what it claims.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pluggy

from polyxla.contracts.discovery import Claim, Device, Discovery
from polyxla.contracts.precision import Precision, UnchangedPrecision
from polyxla.env import POLYXLA_DEVICES, POLYXLA_RUNTIME, Setting
from polyxla.errors import BrokenPluginError, DevicesError, RuntimeUnavailableError, UsageError, pip_install
from polyxla.plugin_manager import (
    ASKING,
    RuntimeEntry,
    find_runtime,
    load_runtime,
    runtime_entries,
    unknown_variables,
)

MAX_MADE = 4096
"""Largest number of devices that are made on request; a larger count is taken for a typing error."""
DISTRIBUTION = "polyxla-precision"
"""The distribution that brings the usual policies."""
FIX = "Write precision='bf16-mixed' or '32-true', or leave it out to keep the module's own dtypes."


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
    # Another author's plugin may raise anything, and must not keep the other runtimes from being found.
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


def prepare_selection(environ: Mapping[str, str], selection: Selection) -> None:
    """Keep the selection that was made in this process before the program's first line, for `select_once`."""
    _prepared[:] = [(dict(environ), selection)]


def select_once(environ: Mapping[str, str], runtime: Setting, accelerator: str = "auto") -> Selection:
    """Return the selection that ``polyxla run`` has prepared for these arguments, else that of `select`.

    Only the first launch may use it: later ones look for devices again, which may have changed.
    """
    if _prepared:
        # It is taken out whether it fits or not: only the first launch may use it.
        known, selection = _prepared.pop()
        is_asked = (selection.runtime, selection.reason) == (runtime.value, runtime.origin)
        if is_asked and accelerator == "auto" and known == environ:
            return selection
    return select(environ, runtime, accelerator)


_prepared: list[tuple[Mapping[str, str], Selection]] = []
"""At most one, with the environment that it was made in."""


def choose(candidates: Sequence[Candidate], environ: Mapping[str, str]) -> Selection:
    """Choose among the candidates by their claims.

    Raises:
        UsageError: no candidate claims this environment, the strongest claim is not unique, or the winner
            cannot be used.
    """
    # An explicit claim wins over a missing runtime; below that, a variable that asks for one is an error.
    missing = _find_missing(candidates, environ)
    ranked = sorted(candidates, key=lambda candidate: -candidate.claim)
    if not ranked or ranked[0].claim < Claim.EXPLICIT:
        _check_missing(missing, candidates)
    if not ranked or ranked[0].claim is Claim.NONE:
        raise _no_claim(candidates)
    winner, others = ranked[0], ranked[1:]
    if others and others[0].claim is winner.claim:
        raise _equal_claims(winner, others[0])
    # A fallback has no origin that an error could name: the user has set nothing.
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
        raise next(other.error for other in candidates if other.name == name and other.error)


def _reason(candidate: Candidate) -> str:
    return candidate.discovery.reason if candidate.discovery else ""


def _no_claim(candidates: Sequence[Candidate]) -> RuntimeUnavailableError:
    seen = "; ".join(f"{candidate.name}: {candidate.why_not or 'not asked for'}" for candidate in candidates)
    return RuntimeUnavailableError(
        f"no runtime can be chosen ({seen or 'none is installed'})",
        fix=f"Install one, such as: {pip_install('polyxla-runtime-pjrt')}"
        if not candidates
        else f"Name one with --runtime or {POLYXLA_RUNTIME}.",
    )


def _equal_claims(first: Candidate, second: Candidate) -> RuntimeUnavailableError:
    return RuntimeUnavailableError(
        f"runtimes {first.name!r} ({_reason(first)}) and {second.name!r} ({_reason(second)}) "
        "claim this environment equally",
        fix=f"Name one with --runtime or {POLYXLA_RUNTIME}.",
    )


def _warnings(
    winner: Candidate, others: Sequence[Candidate], missing: Mapping[str, Setting]
) -> tuple[str, ...]:
    rivals = {other.name: _reason(other) for other in others if other.claim >= Claim.CONFIGURED}
    rivals |= {name: asked.origin for name, asked in missing.items()}
    conflicts = [
        f"{reason} asks for runtime {name!r} and {_reason(winner)} for {winner.name!r}: "
        f"{winner.name!r} wins. Unset one of them, or name a runtime with --runtime."
        for name, reason in rivals.items()
    ]
    broken = [f"left out: {other.error}" for other in others if other.error]
    # A runtime that nothing asks for, or that cannot run, may know the reason, such as a misspelt variable.
    unused = [other for other in others if other.claim is Claim.NONE or other.why_not]
    found = [candidate.discovery for candidate in (winner, *unused) if candidate.discovery]
    notes = [note for discovery in found for note in discovery.notes]
    return (*conflicts, *broken, *notes)


def pick_devices(
    asked: Setting, runtime: str, devices: Sequence[Device], growable: bool = False
) -> tuple[int, ...]:
    """Return the indices of the requested devices.

    Args:
        asked: ``"auto"``, a count (``8`` or ``"8"``) or indices (``[5]`` or ``"[5]"``), and its origin.
        runtime: the runtime's name, for errors.
        devices: the runtime's devices.
        growable: whether the runtime makes more devices on request.

    Raises:
        DevicesError: the request cannot be read, or names devices that do not exist.
    """
    if asked.value == "auto":
        return tuple(device.index for device in devices)
    value = _parse(asked)
    # Larger requests make devices; smaller ones choose among those that exist, and are checked below.
    if growable and (count := _count_to_make(value, len(devices))):
        return tuple(range(count))
    if isinstance(value, int):
        return _by_count(value, asked, runtime, devices)
    return _by_index(value, asked, runtime, devices)


def _count_to_make(value: int | list[Any], have: int) -> int | None:
    """Return how many devices to make: a larger count, or indices 0 to count - 1. None: make none."""
    count = value if isinstance(value, int) else len(value)
    if not have < count <= MAX_MADE or (isinstance(value, list) and value != list(range(count))):
        return None
    return count


def _parse(asked: Setting) -> int | list[Any]:
    value = asked.value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:  # Python refuses to convert very long numbers, with the same error
            raise _unreadable(asked) from None
    if isinstance(value, tuple | range):
        value = list(value)
    if isinstance(value, int | list) and not isinstance(value, bool):
        return value
    raise _unreadable(asked)


def _unreadable(asked: Setting) -> DevicesError:
    forms = [_written(asked, text) for text in ("auto", "8", "[5]")]
    fix = f"Write {forms[0]}, a count such as {forms[1]}, or indices such as {forms[2]}."
    if isinstance(asked.value, str) and re.fullmatch(r"\d+( *, *\d+)+", asked.value):
        fix = f"Write {_written(asked, f'[{asked.value}]')}."
    problem = f"devices={asked.value!r} is neither a count, a list of indices nor 'auto'"
    return DevicesError(problem, where=asked.origin, fix=fix)


def _written(asked: Setting, text: str) -> str:
    """Return how another value is written where this one was: an option, a variable, or in Python."""
    if asked.origin.startswith("--devices"):
        return shlex.join(["--devices", text])
    if asked.origin.startswith(POLYXLA_DEVICES):
        return f"{POLYXLA_DEVICES}={shlex.quote(text)}"
    return f"devices={text!r}" if text == "auto" else f"devices={text}"


def _by_count(count: int, asked: Setting, runtime: str, devices: Sequence[Device]) -> tuple[int, ...]:
    if count < 1:
        raise DevicesError(
            f"devices={count} asks for no device", where=asked.origin, fix=_valid_counts(asked, devices)
        )
    if count > len(devices):
        raise DevicesError(
            f"devices={count} asks for {count} devices, but runtime {runtime} has {len(devices)} here",
            where=asked.origin,
            fix=_valid_counts(asked, devices),
        )
    return tuple(device.index for device in devices[:count])


def _valid_counts(asked: Setting, devices: Sequence[Device]) -> str:
    if len(devices) == 1:
        return f"Write {_written(asked, '1')}."
    return f"Write a count from 1 to {len(devices)}, or {_written(asked, 'auto')} for all of them."


def _by_index(indices: list[Any], asked: Setting, runtime: str, devices: Sequence[Device]) -> tuple[int, ...]:
    have = [device.index for device in devices]
    last = _written(asked, f"[{have[-1]}]")
    span = f"Name devices from {have[0]} to {have[-1]}, each once, such as {last}."
    if not indices:
        raise DevicesError("devices=[] names no device", where=asked.origin, fix=span)
    for index in indices:
        # In Python True and 1.0 are in [1], but neither is the number of a device.
        if isinstance(index, bool | float) or index not in have:
            raise DevicesError(
                f"devices={indices} names device {index!r}, "
                f"but runtime {runtime} has devices {have[0]} to {have[-1]}",
                where=asked.origin,
                fix=span,
            )
    if len(set(indices)) != len(indices):
        raise DevicesError(f"devices={indices} names a device twice", where=asked.origin, fix=span)
    return tuple(indices)


def find_precision(plugins: pluggy.PluginManager, asked: Setting) -> Precision:
    """Return the policy that was asked for: the object itself, or the one that a plugin has for the name.

    Raises:
        UsageError: the object is neither a policy nor a name, no installed plugin knows the name, or a
            plugin refuses it with a reason.
    """
    if asked.value is None:
        return UnchangedPrecision()
    # An int is a name too, as in precision=16.
    if not isinstance(asked.value, str | int):
        return _given_policy(asked)
    try:
        policy: Precision | None = plugins.hook.polyxla_precision(name=str(asked.value))
    except ValueError as error:
        raise UsageError(str(error), where=asked.origin, fix=FIX) from None
    if policy is None:
        raise UsageError(
            f"no installed plugin knows the precision {asked.value!r}", where=asked.origin, fix=_fix()
        )
    return policy


def _given_policy(asked: Setting) -> Precision:
    # The class of a policy also has the method, but is not a policy.
    if isinstance(asked.value, type) or not hasattr(asked.value, "forward_context"):
        raise UsageError(
            "precision is neither a policy's name nor a policy",
            where=asked.origin,
            fix="Write a name such as precision='bf16-mixed', or pass a policy such as BF16True().",
        )
    given: Precision = asked.value
    return given


def _fix() -> str:
    try:
        importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"Install the usual policies: {pip_install(DISTRIBUTION)}"
    return FIX
