"""Errors that teach: what was wrong, where it was set, what to write instead."""

from __future__ import annotations


class PolyxlaError(Exception):
    """The base of every error polyxla raises on purpose.

    The command line prints it without a traceback and leaves with `exit_code`.
    """

    exit_code = 1


class UsageError(PolyxlaError):
    """Something the caller wrote cannot work; nothing was started.

    Args:
        what: what was wrong, a sentence without its full stop.
        where: where it was set, such as ``devices=9`` or ``POLYXLA_RUNTIME=foo``.
        fix: what to write instead, a sentence with its full stop.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, fix: str) -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        origin = f" (from {self.where})" if self.where else ""
        return f"{self.what}{origin}. {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        # With the dictionary, which holds the notes that say which replica it was.
        return (_rebuild, (type(self), self.what, self.where, self.fix), self.__dict__)


class UnknownRuntimeError(UsageError):
    """No installed plugin has this runtime's name, and no known one either."""


class RuntimeNotInstalledError(UsageError):
    """The runtime is a known one, but its package is not installed."""


class BrokenPluginError(UsageError):
    """A plugin is installed but cannot be used: import error, clash of names, misspelt hook."""


class RuntimeUnavailableError(UsageError):
    """The chosen runtime cannot run here, or no runtime could be chosen."""


class DevicesError(UsageError):
    """``devices=`` asks for something this machine does not have."""


class ReplicaLostError(PolyxlaError):
    """A replica's process ended without a result: killed, crashed or out of memory."""


class StalledError(PolyxlaError):
    """A replica waited longer than it may.

    For others (POLYXLA_STALL_TIMEOUT_S), when all are ended; or for a batch (POLYXLA_INPUT_TIMEOUT_S).
    """


def _rebuild(kind: type[UsageError], what: str, where: str | None, fix: str) -> UsageError:
    return kind(what, where=where, fix=fix)
