"""A runtime's report on this machine: its devices, and how strongly the environment asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from polyxla.env import Setting
from polyxla.errors import UsageError


class Claim(IntEnum):
    """How strongly an environment asks for a runtime; the strongest claim wins."""

    NONE = 0
    """Nothing asks for this runtime."""
    FALLBACK = 1
    """It runs on any machine, if no other runtime claims more."""
    ATTACHED = 2
    """Its accelerators are attached to this machine."""
    CONFIGURED = 3
    """Variables describe a cluster that only this runtime can use."""
    EXPLICIT = 4
    """A variable whose purpose is to choose it is set."""


@dataclass(frozen=True)
class Device:
    """A device that a replica can run on.

    Attributes:
        index: its number in ``devices=[index]``.
        kind: its runtime's name for this kind of device, such as ``CPU`` or ``TPU``.
        name: a name for the user, shown by ``polyxla devices``.
        host_index: number of the host it belongs to.
    """

    index: int
    kind: str
    name: str
    host_index: int = 0


@dataclass(frozen=True)
class Discovery:
    """A runtime's answer to `polyxla.hookspecs.polyxla_discover_devices`.

    Set exactly one of `devices` and `unavailable`. With `unavailable`, `fix` is required; `kind`, `growable`,
    `host_count` and `topology` describe `devices`. `claim` and `reason` depend on neither: a runtime that is
    asked for but cannot run claims just as strongly, so that the user sees why and does not get another one.

    Attributes:
        claim: how strongly the environment asks for this runtime.
        reason: what the claim is based on, such as ``TOY_DEVICE=1``.
        kind: the kind of the devices; empty if there are none.
        devices: the devices that a launch can use, in the order of their indices.
        unavailable: why nothing can run here; None if something can.
        fix: what to do about `unavailable`; a sentence with its full stop.
        growable: whether the runtime makes more devices than `devices` when a launch requests a larger count.
        host_count: number of hosts that the devices are spread over.
        topology: such as ``v4-16``; None if there is none.
        variables: each variable that the runtime reads, with its value and origin, for ``polyxla env``.
        notes: warnings to print once, such as a variable that has no effect.
    """

    claim: Claim
    reason: str
    kind: str = ""
    devices: tuple[Device, ...] = ()
    unavailable: str | None = None
    fix: str = ""
    growable: bool = False
    host_count: int = 1
    topology: str | None = None
    variables: Mapping[str, Setting] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Check that something can run here.

        Raises:
            UsageError: nothing can; it names the variables that ask for this runtime.
        """
        if self.unavailable:
            where = self.reason if self.claim >= Claim.CONFIGURED else None
            raise UsageError(self.unavailable, where=where, fix=self.fix)
