"""A variable as it is set, and the parsers of numbers and flags. Pure functions over text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from polyxla import UsageError


class Variable(NamedTuple):
    """A variable that is set, and its text without surrounding whitespace."""

    name: str
    text: str

    @property
    def where(self) -> str:
        """The variable and its value, as an error names them."""
        return f"{self.name}={self.text}"

    def error(self, what: str, fix: str) -> UsageError:
        """Return the error that names this variable as the cause.

        Args:
            what: what is wrong, a sentence without its full stop.
            fix: what to write instead, a sentence with its full stop.
        """
        return UsageError(what, where=self.where, fix=fix)


def find(environ: Mapping[str, str], name: str) -> Variable | None:
    """Return a variable, or None if it is unset or empty."""
    text = environ.get(name, "").strip()
    return Variable(name, text) if text else None


def parse_integer(text: str) -> int | None:
    """Parse a non-negative integer of at most nine digits; return None for any other text."""
    # `int` itself accepts signs, underscores and the digits of other scripts.
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def read_count(variable: Variable, meaning: str, least: int = 1) -> int:
    """Read a count.

    Args:
        variable: the variable that holds it.
        meaning: the meaning of the number, for the error, such as ``the number of hosts``.
        least: the smallest valid value.

    Raises:
        UsageError: the value is not an integer of at least `least`.
    """
    count = parse_integer(variable.text)
    if count is None or count < least:
        raise variable.error(
            f"{variable.text!r} is not an integer of at least {least}", f"Write {meaning}, or unset it."
        )
    return count


def read_flag(variable: Variable) -> bool:
    """Read a boolean: ``1``, ``0``, ``true`` or ``false``.

    Raises:
        UsageError: the value is none of these.
    """
    flags = {"1": True, "true": True, "0": False, "false": False}
    if (flag := flags.get(variable.text.lower())) is None:
        raise variable.error(
            f"{variable.text!r} is neither true nor false",
            f"Write {variable.name}=1 or {variable.name}=0.",
        )
    return flag
