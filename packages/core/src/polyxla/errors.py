"""Errors that teach: what was wrong, where it was set, what to write instead."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

WHEELS = ["--find-links", "dist"]
"""Arguments of pip, until the packages are released: where users put the wheels, by the documentation."""
_NEEDS = {"polyxla-runtime-xrt": ["polyxla-bridge"]}
"""What a package requires of ours beside the core, which pip does not find in a directory of sources."""


def pip_install(distribution: str) -> str:
    """Return the command that installs a package of ours, such as ``polyxla-training[report]``."""
    if not (packages := _source_packages()):
        return shlex.join(["pip", "install", *WHEELS, distribution])
    names = [*_NEEDS.get(distribution, []), distribution]
    return shlex.join(["pip", "install", *(packages + name.removeprefix("polyxla-") for name in names)])


def _source_packages() -> str:
    """Return the directory of the packages' sources, if it is here, or the core was installed from it."""
    if Path("packages/core/pyproject.toml").is_file():
        return "./packages/"
    # Imported here: every process imports this module, and few build this message.
    import importlib.metadata
    import json
    from urllib.parse import unquote, urlsplit

    # Source: PEP 610.
    url = json.loads(importlib.metadata.distribution("polyxla-core").read_text("direct_url.json") or "{}")
    source = urlsplit(url.get("url", ""))
    core = Path(unquote(source.path))
    return f"{core.parent}/" if source.scheme == "file" and core.is_dir() else ""


class PolyxlaError(Exception):
    """Base class of every error that polyxla raises on purpose.

    The command line prints it without a traceback and exits with `exit_code`.
    """

    exit_code = 1


class UsageError(PolyxlaError):
    """The caller's input cannot work; nothing was started.

    Args:
        what: what was wrong; a sentence without its full stop.
        where: where it was set, such as ``devices=9`` or ``POLYXLA_RUNTIME=foo``.
        fix: what to write instead; a sentence with its full stop.
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
        # Exceptions pickle their positional arguments only, and two of these are keywords. The dictionary
        # holds the notes, which name the replica that failed.
        return (functools.partial(type(self), where=self.where, fix=self.fix), (self.what,), self.__dict__)


class UnknownRuntimeError(UsageError):
    """Neither an installed plugin nor a known runtime has this name."""


class RuntimeNotInstalledError(UsageError):
    """The runtime is known, but its package is not installed."""


class BrokenPluginError(UsageError):
    """A plugin is installed but unusable: it fails to import, its name clashes, or a hook is misspelt."""


class RuntimeUnavailableError(UsageError):
    """The chosen runtime cannot run here, or no runtime could be chosen."""


class DevicesError(UsageError):
    """``devices=`` requests devices that this machine does not have."""


class ReplicaLostError(PolyxlaError):
    """A replica ended without a result: it exited, or its process was killed or crashed."""


class DisagreementError(PolyxlaError):
    """Replicas called different collectives in the same turn, such as a sum and a maximum; neither ran.

    Or they computed different layers of a divided module; none of its parameters was changed.
    """


class StalledError(PolyxlaError):
    """A replica waited longer than its limit, for other replicas or for its next batch.

    ``POLYXLA_STALL_TIMEOUT_S`` limits the wait for other replicas, ``POLYXLA_INPUT_TIMEOUT_S`` the wait for a
    batch. All replicas are then stopped.
    """
