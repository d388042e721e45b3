"""`Finding`: what a check found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    """Nothing to do."""
    NOTE = "note"
    """Worth knowing; training can work all the same."""
    PROBLEM = "problem"
    """Training fails, or a setting is ignored, until the user does something."""


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        status: how much it matters.
        subject: what was checked, in one or two words.
        found: what was found; a sentence or a phrase without its full stop.
        fix: what to do, in a sentence; empty if nothing need be done.
    """

    status: Status
    subject: str
    found: str
    fix: str = ""


def ok(subject: str, found: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(Status.OK, subject, found)


def note(subject: str, found: str, fix: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(Status.NOTE, subject, found, fix)


def problem(subject: str, found: str, fix: str) -> Finding:
    """Return a finding that prevents training, or a setting from having its effect."""
    return Finding(Status.PROBLEM, subject, found, fix)


def counted(number: int, what: str) -> str:
    """Return a number with its noun, such as ``2 chips``."""
    return f"{number} {what}{'' if number == 1 else 's'}"
