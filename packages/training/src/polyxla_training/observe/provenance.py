"""Where a run comes from: the command, its environment and its source."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torch_xla", "torch_tpu", "jaxlib", "libtpu", "numpy", "lightning")
"""Packages whose releases change what a run computes, beside polyxla's own."""
GIT_TIMEOUT_S = 2.0
"""Longest wait for one git command: a repository on a slow network disk must not delay a training."""


def provenance() -> dict[str, Any]:
    """Return the command line, host, system, releases, and the git commit of the script, if there is one."""
    return {
        "command": shlex.join([sys.executable, *sys.argv]),
        "directory": str(Path.cwd()),
        "host": platform.node(),
        "system": platform.platform(),
        "versions": versions(),
        "git": git_state(_script_directory()),
    }


def versions() -> dict[str, str]:
    """Return the releases of Python, of `PACKAGES` and of polyxla's packages; of those that are installed."""
    # Of a distribution that is found twice on the path, the first is imported.
    releases = {_normal(one.name): one.version for one in reversed([*distributions()]) if one.name}
    ours = sorted(name for name in releases if name.startswith("polyxla"))
    return {
        "python": platform.python_version(),
        **{name: releases[name] for name in (*PACKAGES, *ours) if name in releases},
    }


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")


def _script_directory() -> Path:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve().parent if file else Path.cwd()


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return the commit, the branch, and the number of changed files that git tracks; None outside of git.

    Args:
        directory: any directory of the repository.
    """
    try:
        commit, branch = _git(directory, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
        changed = list(_git(directory, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "branch": branch, "changed_files": len(changed)}


def _git(directory: Path, *arguments: str) -> Iterator[str]:
    done = subprocess.run(
        ["git", "-C", str(directory), *arguments],  # noqa: S607 - the user's git, wherever it is
        capture_output=True,
        text=True,
        timeout=GIT_TIMEOUT_S,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return iter(done.stdout.splitlines())


def hyper_parameters(module: Any) -> dict[str, Any]:
    """Return the module's ``hparams``, which a LightningModule's ``save_hyperparameters`` sets."""
    found = getattr(module, "hparams", None)
    return dict(found) if isinstance(found, Mapping) else {}
