"""The log of a run: one JSON document per line. The first tells where the run comes from."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyxla import UsageError
from polyxla.plugin import say
from polyxla_training.storage import check_location, locate

if TYPE_CHECKING:
    from polyxla import Replica

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
    # Reversed, so that of a distribution that is found twice on the path the first one remains: that one is
    # imported.
    releases = {
        _normal(distribution.name): distribution.version
        for distribution in reversed([*distributions()])
        if distribution.name
    }
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


RUN_LOG = "run.jsonl"
"""Name of the file in a run's directory."""


class Expendable:
    """A log whose loss does not end a training: its first error is printed, and it is not written again.

    Args:
        name: what is lost, for the line that is printed.

    Attributes:
        is_lost: whether there was an error.
    """

    def __init__(self, name: str) -> None:
        self._name, self.is_lost = name, False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Print the first error of the block; a UsageError, which the program can mend, is raised."""
        try:
            yield
        except UsageError:
            raise
        # Any exception: the clients of wandb's and MLflow's servers raise types of their own.
        except Exception as error:
            if not self.is_lost:
                self.is_lost = True
                say(f"{self._name} is not written any more, and training goes on: {error}")


class RunLog:
    """Writes a run's events. Every line is flushed, so that it survives the process.

    If the directory has a run already, the new one is appended. A full disk is reported once, and ends
    nothing but the log.

    Args:
        directory: the run's directory; made if it is missing.
    """

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory) / RUN_LOG
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = Expendable(str(path))
        is_torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if is_torn:
            # The run before was killed while it wrote a line; its torn end must not swallow the next line.
            self._file.write("\n")

    def start(self, replica: Replica, **fields: Any) -> None:
        """Append the start event: step, runtime, device, number of replicas, `fields`, and the provenance.

        A run that resumes begins at a later step than 0, and continues the run before in the file.
        """
        self.write(
            "start",
            step=replica.steps,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            polyxla=version("polyxla-core"),
            runtime=replica.runtime,
            device=replica.kind,
            world_size=replica.world_size,
            **fields,
            **provenance(),
        )

    def write(self, event: str, **fields: Any) -> None:
        """Append an event with its time; numbers that are not finite become null, because JSON has none."""
        if self._log.is_lost:
            return
        document = {"event": event, "time": round(time.time(), 3), **fields}
        # default=str: options may hold any object, and a log must not end a training.
        line = json.dumps(_finite(document), allow_nan=False, default=str)
        with self._log.attempt():
            self._file.write(line + "\n")
            # Flushed per line: a run that is killed keeps all events but the one that it was writing.
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with self._log.attempt():
            self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_run(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of the last run in a log, with those of the runs that it resumed.

    A line that was cut off is left out.

    Args:
        run: a run's directory, or the log itself; a path or a URL.

    Raises:
        UsageError: there is no log, no run in it, or it cannot be read.
    """
    check_location(run, "the run")
    place = locate(run)
    is_directory = place.is_dir() if isinstance(place, Path) else not place.name.endswith(".jsonl")
    path = place / RUN_LOG if is_directory else place
    fix = "Pass the log_dir of a training, or the file itself."
    try:
        # A line may be cut within a character.
        text = path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError as error:
        raise UsageError(f"there is no {RUN_LOG}", where=str(run), fix=fix) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}", where=str(run), fix=fix) from error
    events = list(_events(text))
    starts = [index for index, event in enumerate(events) if event.get("event") == "start"]
    if not starts:
        raise UsageError("the file contains no run", where=str(path), fix="Train with log_dir set.")
    # The last part that began at step 0; all parts after it have resumed it.
    first = next((start for start in reversed(starts) if not events[start].get("step")), starts[0])
    return events[first:]


def _events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def newest_run(directory: str | Path) -> Path:
    """Return the run's directory below `directory` that was written to last.

    Raises:
        UsageError: there is no run.
    """
    # By the time of writing: directories are named by their start, and a resumed run may be older.
    logs = sorted(Path(directory).glob(f"**/{RUN_LOG}"), key=lambda log: log.stat().st_mtime)
    if not logs:
        raise UsageError(
            f"there is no run below {directory}",
            where="polyxla report",
            fix="Pass the log_dir of a training.",
        )
    return logs[-1].parent
