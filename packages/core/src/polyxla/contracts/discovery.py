"""What a runtime reports about this machine: its devices, and how strongly the environment asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from polyxla.env import Setting


class Claim(IntEnum):
    """How strongly an environment speaks for a runtime; the strongest claim is chosen."""

    NONE = 0
    """Nothing here points to this runtime."""
    FALLBACK = 1
    """It runs on any machine, where nothing better is found."""
    ATTACHED = 2
    """Its accelerators are attached to this machine."""
    CONFIGURED = 3
    """Variables describe a cluster that only this runtime can use."""
    EXPLICIT = 4
    """A variable whose purpose is to choose it is set."""


@dataclass(frozen=True)
class Device:
    """One device a replica can run on.

    Attributes:
        index: its number in ``devices=[index]``.
        kind: what its runtime calls it, such as ``CPU`` or ``TPU``.
        name: what a person would recognise it by.
        host_index: the host it belongs to.
    """

    index: int
    kind: str
    name: str
    host_index: int = 0


@dataclass(frozen=True)
class Discovery:
    """A runtime's answer to: what can you see here, and does this environment ask for you?

    Attributes:
        claim: how strongly the environment speaks for this runtime.
        reason: what makes the claim, such as ``TOY_DEVICE=1``.
        kind: the kind of the devices; empty where there are none.
        devices: the devices a launch from here can use, by index.
        unavailable: why nothing can run; None where it can.
        fix: what to do about `unavailable`.
        growable: whether a larger count than `devices` can be had by asking for it.
        host_count: number of hosts the devices are spread over.
        topology: such as ``v4-16``; None where there is none.
        variables: each variable the runtime reads, with its value and origin, for ``polyxla env``.
        notes: what a person should be told once, such as a variable that has no effect.
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
