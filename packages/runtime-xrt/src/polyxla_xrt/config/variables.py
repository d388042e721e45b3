"""A variable as it is set, and the numbers in it. Pure functions over text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from polyxla.errors import UsageError


class Variable(NamedTuple):
    """A variable that is set, and its text without surrounding spaces."""

    name: str
    text: str

    @property
    def where(self) -> str:
        """The way an error names it."""
        return f"{self.name}={self.text}"

    def error(self, what: str, fix: str) -> UsageError:
        """Return the error that says what is wrong with it."""
        return UsageError(what, where=self.where, fix=fix)


def find(environ: Mapping[str, str], name: str) -> Variable | None:
    """Return a variable, or None where it is unset or empty."""
    text = environ.get(name, "").strip()
    return Variable(name, text) if text else None


def whole(text: str) -> int | None:
    """Read a whole number from 0; None where the text is no such number, or an absurd one."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def read_count(variable: Variable, meaning: str, least: int = 1) -> int:
    """Read a number.

    Args:
        variable: where it is.
        meaning: what it is, for the error, such as ``the number of hosts``.
        least: the smallest that makes sense.

    Raises:
        UsageError: it is not a whole number from `least`.
    """
    count = whole(variable.text)
    if count is None or count < least:
        raise variable.error(
            f"{variable.text!r} is not a whole number from {least}", f"Write {meaning}, or unset it."
        )
    return count


def read_flag(variable: Variable) -> bool:
    """Read a yes or no.

    Raises:
        UsageError: it is neither.
    """
    flags = {"1": True, "true": True, "0": False, "false": False}
    if (flag := flags.get(variable.text.lower())) is None:
        raise variable.error(
            f"{variable.text!r} is neither yes nor no", f"Write {variable.name}=1 or {variable.name}=0."
        )
    return flag
