"""The jobs that were started on this machine, for ``polyxla pod ps``, ``logs`` and ``kill``.

A job lives as long as its launcher, which holds a lock in the job's directory. The lock tells what runs
without a question to a host, even after a launcher was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from polyxla import UsageError
from polyxla.plugin import say
from polyxla_pod.folding import FoldedLine
from polyxla_pod.pipeline import HostState

KEPT = 50
"""How many jobs are kept."""
WRITE_S = 1.0
"""How often the hosts' states are written, in seconds."""
END_S = 20.0
"""Longest wait of ``polyxla pod kill`` for the launcher to end, in seconds."""


def root(environ: Mapping[str, str]) -> Path:
    """Return the directory of all jobs. Source: the XDG Base Directory Specification.

    Raises:
        UsageError: this user has no home.
    """
    try:
        state = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError as error:
        raise UsageError(
            "this user has no home directory, where jobs are recorded",
            fix="Set HOME, or XDG_STATE_HOME to a directory that this process may write.",
        ) from error
    return state / "polyxla" / "pod"


def _machine() -> str:
    """Return a name for where this process's id holds: a container has ids of its own."""
    with contextlib.suppress(OSError):
        return f"{platform.node()} {Path('/proc/self/ns/pid').readlink()}"
    return platform.node()


class JobLog:
    """Writes a running job's output and state. If they cannot be written, the job goes on without them.

    Args:
        directory: the directory of all jobs.
        description: what is known at the start, as JSON-compatible values; without the values of variables.
        states: the hosts, whose states are written while the job runs.

    Attributes:
        id: the job's name, which begins with its time.
        is_lost: whether something could not be written.
    """

    def __init__(self, directory: Path, description: dict[str, Any], states: Sequence[HostState]) -> None:
        # Sorting by name sorts by time.
        self.id = f"{time.strftime('%y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._directory = directory / self.id
        self._states = states
        own = {"pid": os.getpid(), "machine": _machine()}
        self._description = {"id": self.id, **own, "started": time.time(), **description}
        self._written_s = 0.0
        self.is_lost = False
        self._files = contextlib.ExitStack()
        self._log: TextIO | None = None
        with self._losable():
            # The log may contain what no other user should read.
            self._directory.mkdir(parents=True, mode=0o700)
            lock = self._files.enter_context((self._directory / "lock").open("w"))
            # The lock ends with this process, however it ends, so no stale state is possible.
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._log = (self._directory / "output.jsonl").open("w", encoding="utf-8")
            _remove_old(directory)
        self.write_states()

    def add(self, line: FoldedLine) -> None:
        """Add a line to the job's log."""
        document = {"time": time.time(), "hosts": line.hosts, "stream": line.stream, "text": line.text}
        if self._log is not None:
            with self._losable():
                self._log.write(json.dumps(document) + "\n")

    def tick(self) -> None:
        """Write the hosts' states and the end of the log, every `WRITE_S`."""
        if time.monotonic() - self._written_s > WRITE_S:
            self.write_states()

    def write_states(self) -> None:
        """Write the job with its hosts' states."""
        self._written_s = time.monotonic()
        if self._log is None:
            return
        text = json.dumps({**self._description, "hosts": [state.as_json() for state in self._states]})
        # Renaming is atomic: readers see the old or the new file, never a part.
        new = self._directory / "job.json.new"
        with self._losable():
            self._log.flush()
            new.write_text(text, encoding="utf-8")
            new.replace(self._directory / "job.json")

    def close(self, exit_code: int, failures: Sequence[str]) -> None:
        """Write how the job ended."""
        self._description |= {"exit_code": exit_code, "failures": list(failures), "ended": time.time()}
        self.write_states()
        if self._log is not None:
            with self._losable():
                self._log.close()
        self._files.close()

    @contextlib.contextmanager
    def _losable(self) -> Iterator[None]:
        """Report the first failure to write, such as on a full disk: a job is worth more than its log."""
        try:
            yield
        except OSError as error:
            if not self.is_lost:
                self.is_lost = True
                lacking = "its log lacks a part" if self._log else "the job has no log"
                say(f"warning: {self._directory} cannot be written ({error.strerror}): {lacking}")


def _remove_old(directory: Path) -> None:
    ids = sorted(path.name for path in directory.iterdir() if path.is_dir())
    for name in ids[:-KEPT]:
        if not is_running(directory / name):
            shutil.rmtree(directory / name, ignore_errors=True)


def is_running(directory: Path) -> bool:
    """Return whether a job's launcher lives."""
    try:
        with (directory / "lock").open() as lock:
            # Shared, so that two commands that ask at the same time do not take each other for the launcher.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_all(directory: Path) -> list[dict[str, Any]]:
    """Return what is known of all jobs, oldest first; ``running`` says whether the launcher lives."""
    found = []
    for path in sorted(directory.glob("*/job.json")):
        try:
            job = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # Another launcher may just have removed this job.
            continue
        found.append({**job, "running": is_running(path.parent)})
    return sorted(found, key=lambda job: float(job["started"]))


def find(directory: Path, job: str | None) -> dict[str, Any]:
    """Return what is known of a job, by its id or the beginning of it; by default of the newest.

    Raises:
        UsageError: there is no such job, or several jobs have ids with this beginning.
    """
    jobs = read_all(directory)
    found = [known for known in jobs if known["id"].startswith(job)] if job else jobs[-1:]
    if len(found) == 1:
        return found[0]
    what = (
        f"{len(found)} jobs have an id that begins with {job}"
        if found
        else f"there is no job {job or ''}".strip()
    )
    raise UsageError(what, fix="`polyxla pod ps` lists the jobs that were started on this machine.")


def log_lines(
    directory: Path, job: Mapping[str, Any], host: int | None, *, follow: bool
) -> Iterator[FoldedLine]:
    """Return the lines of a job's log.

    Args:
        directory: the directory of all jobs.
        job: what is known of the job.
        host: the only host to return lines of; None for all.
        follow: whether to wait for further lines as long as the job runs.
    """
    path = directory / job["id"]
    with (path / "output.jsonl").open(encoding="utf-8") as file:
        while True:
            # Ask before reading, so that the lines that the launcher wrote last are read after its end.
            runs = follow and is_running(path)
            for line in _whole_lines(file):
                if host is None or host in line["hosts"]:
                    yield FoldedLine(line["stream"], line["text"], line["time"], line["hosts"])
            if not runs:
                return
            time.sleep(0.2)


def _whole_lines(file: TextIO) -> Iterator[dict[str, Any]]:
    while True:
        position = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            # The launcher has written a part of this line: read it again when it is complete.
            file.seek(position)
            return
        yield json.loads(line)


def end(directory: Path, job: Mapping[str, Any]) -> bool:
    """End a job by a signal to its launcher; return whether it ended within `END_S`.

    Raises:
        UsageError: the launcher runs on another machine or in another container, which share the directory.
    """
    path = directory / job["id"]
    deadline = time.monotonic() + END_S
    if is_running(path):
        # Here, the launcher's process id may belong to another process.
        there, here = job.get("machine"), _machine()
        if there != here:
            raise UsageError(
                f"job {job['id']} was started elsewhere: on {there}, and this is {here}",
                fix="Run the command there.",
            )
        # The kernel releases the lock with the process: while it is held, the pid belongs to the launcher.
        os.kill(job["pid"], signal.SIGTERM)
    while is_running(path) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(path)
