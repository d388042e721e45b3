"""The harness of the benchmarks: contestants in separate processes take turns; a table shows the ratios."""

from __future__ import annotations

import contextlib
import inspect
import json
import operator
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aims import AIMS

ROUNDS = 6
ROUND_S = 1.0
"""Approximate length of one round of one contestant, in seconds."""
HOST = "127.0.0.1"
JSON = "--json"
NATIVE = {"PJRT_DEVICE": "CPU"}
_IS_MET = {">=": operator.ge, "<=": operator.le}
START_TIMEOUT_S = 300
"""Time limit for a contestant's replicas to connect, in seconds."""


class Contestant:
    """Replicas that train on request.

    Args:
        start: starts the replicas, which connect to a port.
        model: one of `MODELS`.
        batch: samples of each replica in a step.
        replicas: number of replicas that connect.
        environ: overrides variables of the environment.
    """

    def __init__(
        self, start: Callable[..., None], model: str, batch: int, replicas: int, environ: Mapping[str, str]
    ) -> None:
        self.samples = batch * replicas
        self.steps = 10
        self.rounds: list[float] = []
        self.cpu_ms: list[float] = []
        self._pipes: list[Connection] = []
        with socket.create_server((HOST, 0), backlog=replicas) as listener:
            listener.settimeout(1)
            command = do(start, model, batch, listener.getsockname()[1])
            # Standard output is for the rows, and torch's gloo prints a line there for each of its processes.
            self._process = subprocess.Popen(command, env=os.environ | environ, stdout=subprocess.DEVNULL)
            deadline = time.monotonic() + START_TIMEOUT_S
            self._pipes = [Connection(self._accept(listener, deadline)) for _ in range(replicas)]
        # Compile, then measure how many steps make a round.
        self._run(3)
        self.steps = max(2, int(self.steps * ROUND_S / self._run(self.steps)[0]))

    def _accept(self, listener: socket.socket, deadline: float) -> int:
        """Return the descriptor of the next replica's connection."""
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0].detach()
            if self._process.poll() is not None:
                raise SystemExit(f"a contestant ended with {self._process.returncode} before it connected")
        self._process.kill()
        raise SystemExit(f"a contestant has not connected in {START_TIMEOUT_S} s")

    def round(self) -> None:
        """Train for one round; record the samples per second and the CPU time of a thousand samples."""
        wall_s, cpu_s = self._run(self.steps)
        samples = self.samples * self.steps
        self.rounds.append(samples / wall_s)
        self.cpu_ms.append(cpu_s * 1e6 / samples)

    def _run(self, steps: int) -> tuple[float, float]:
        started = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(steps)
        answers = [pipe.recv() for pipe in self._pipes]
        # Threads of one process all report the CPU time of the process: keep the report of the longest run.
        cpu_s = sum({pid: used_s for pid, _, used_s in sorted(answers)}.values())
        return time.perf_counter() - started, cpu_s

    def close(self) -> None:
        """End the replicas."""
        for pipe in self._pipes:
            pipe.send(None)
        if self._process.wait(60):
            raise SystemExit(f"a contestant ended with {self._process.returncode}")

    def beside(self, peer: Contestant) -> float:
        """Return the ratio of this contestant's speed to the peer's: the median over the rounds."""
        return statistics.median(ours / theirs for ours, theirs in zip(self.rounds, peer.rounds, strict=True))

    @property
    def best(self) -> float:
        """Samples per second in the best round."""
        return max(self.rounds)

    def __str__(self) -> str:
        middle, cpu_ms = statistics.median(self.rounds), statistics.median(self.cpu_ms)
        return f"{self.best:,.0f}/s (median {middle:,.0f}, {cpu_ms:.0f} ms CPU/1000)"


@contextlib.contextmanager
def contest(*starts: Callable[[], Contestant]) -> Iterator[list[Contestant]]:
    """Start contestants, run their rounds in turns, and yield them afterwards."""
    contestants = [start() for start in starts]
    for _ in range(ROUNDS):
        for contestant in contestants:
            contestant.round()
    yield contestants
    for contestant in contestants:
        contestant.close()


def do(function: Callable[..., None], *arguments: Any) -> list[str]:
    """Return the command that runs a function of a benchmark in a new process."""
    return [sys.executable, inspect.getfile(function), "--do", json.dumps([function.__name__, *arguments])]


@dataclass(frozen=True)
class Usage:
    """Time and output of a command.

    Attributes:
        wall_s: seconds from start to end.
        cpu_s: user and system seconds of all its processes.
        output: standard output.
    """

    wall_s: float
    cpu_s: float
    output: str

    def __str__(self) -> str:
        return f"{self.wall_s:.1f} s ({self.cpu_s:.1f} s CPU)"


def used(command: Sequence[str], environ: Mapping[str, str]) -> Usage:
    """Run a command and measure it."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=os.environ | environ, check=True, stdout=subprocess.PIPE, text=True)
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Usage(wall_s, cpu_s, done.stdout)


def resident_bytes(process: int | str = "self") -> int:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


_rows: set[str] = set()
"""Names of the aims that the rows so far have asked for."""


def _aims() -> Mapping[str, str]:
    return AIMS[Path(sys.argv[0]).stem]


def row(case: str, ours: Any, peer: Any, ratio: float) -> None:
    """Print one line of the table or of JSON; a ratio without an aim has no verdict."""
    aims, verdict = _aims(), ""
    aim = case if case in aims else case.partition(":")[0]
    _rows.add(aim)
    if target := aims.get(aim, ""):
        sign, limit = target.split()
        verdict = "met" if _IS_MET[sign](ratio, float(limit)) else "NOT"
    if JSON in sys.argv:
        found = {"case": case, "ours": str(ours), "peer": str(peer), "ratio": ratio, "target": target}
        print(json.dumps({**found, "verdict": verdict, "load": os.getloadavg()[0]}), flush=True)
        return
    print(f"{case:<44}{ours!s:>46}{peer!s:>46}{ratio:>7.2f}{target:>9} {verdict}", flush=True)


def main(parts: Mapping[str, Callable[[], None]], functions: Mapping[str, Callable[..., None]]) -> None:
    """Print the table; in a process that the benchmark started, run one function instead.

    Args:
        parts: the measurements, by name.
        functions: the functions that such a process can run, by name.

    Raises:
        SystemExit: a part has another name, or all parts have run and an aim is of no row.
    """
    if sys.argv[1:2] == ["--do"]:
        name, *arguments = json.loads(sys.argv[2])
        functions[name](*arguments)
        return
    names = [name for name in sys.argv[1:] if name != JSON] or list(parts)
    if unknown := [name for name in names if name not in parts]:
        raise SystemExit(f"{unknown[0]!r} is not one of {', '.join(parts)}")
    if JSON not in sys.argv:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
        print(f"{'case':<44}{'ours':>46}{'peer':>46}{'ratio':>7}{'target':>9}")
    for name in names:
        parts[name]()
    if JSON not in sys.argv:
        print(f"load {os.getloadavg()[0]:.1f} after, this benchmark included")
    if {*names} == {*parts} and (lost := [*_aims().keys() - _rows]):
        raise SystemExit(f"no row has the aims {lost}, which benchmarks/aims.py names")
