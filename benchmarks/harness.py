"""How benchmarks compare: contestants in processes of their own that work in turns, and a table of ratios."""

from __future__ import annotations

import contextlib
import inspect
import json
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

ROUNDS = 6
ROUND_S = 1.0
"""About how long one round of one contestant lasts, in seconds."""
HOST = "127.0.0.1"
JSON = "--json"
NATIVE = {"PJRT_DEVICE": "CPU"}
START_TIMEOUT_S = 300
"""Longest wait for a contestant's replicas, in seconds."""


class Contestant:
    """Replicas that train when they are told to.

    Args:
        how: how they are started, and connect.
        model: one of `MODELS`.
        batch: samples of each replica in a step.
        replicas: how many connect.
        environ: laid over the environment.
    """

    def __init__(
        self, how: Callable[..., None], model: str, batch: int, replicas: int, environ: Mapping[str, str]
    ) -> None:
        self.samples = batch * replicas
        self.steps = 10
        self.rounds: list[float] = []
        self.cpu_ms: list[float] = []
        self._pipes: list[Connection] = []
        with socket.create_server((HOST, 0), backlog=replicas) as listener:
            listener.settimeout(START_TIMEOUT_S)
            command = do(how, model, batch, listener.getsockname()[1])
            self._process = subprocess.Popen(command, env=os.environ | environ)
            self._pipes = [Connection(listener.accept()[0].detach()) for _ in range(replicas)]
        # Compiles, then finds out how many steps make a round.
        self._run(3)
        self.steps = max(2, int(self.steps * ROUND_S / self._run(self.steps)[0]))

    def round(self) -> None:
        """Train for a while; note the samples of a second, and what a thousand of them cost."""
        wall_s, cpu_s = self._run(self.steps)
        samples = self.samples * self.steps
        self.rounds.append(samples / wall_s)
        self.cpu_ms.append(cpu_s * 1e6 / samples)

    def _run(self, steps: int) -> tuple[float, float]:
        started = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(steps)
        told = [pipe.recv() for pipe in self._pipes]
        # Threads of one process all tell its time: the longest is that of all.
        cpu_s = sum({pid: used_s for pid, _, used_s in sorted(told)}.values())
        return time.perf_counter() - started, cpu_s

    def close(self) -> None:
        """Let them end."""
        for pipe in self._pipes:
            pipe.send(None)
        if self._process.wait(60):
            raise SystemExit(f"a contestant ended with {self._process.returncode}")

    def beside(self, peer: Contestant) -> float:
        """Return the median, over the rounds, of this one's speed to the peer's in the same round."""
        return statistics.median(ours / theirs for ours, theirs in zip(self.rounds, peer.rounds, strict=True))

    @property
    def best(self) -> float:
        """Samples of a second in the best round."""
        return max(self.rounds)

    def __str__(self) -> str:
        middle, cpu_ms = statistics.median(self.rounds), statistics.median(self.cpu_ms)
        return f"{self.best:,.0f}/s (median {middle:,.0f}, {cpu_ms:.0f} ms CPU/1000)"


@contextlib.contextmanager
def contest(*starts: Callable[[], Contestant]) -> Iterator[list[Contestant]]:
    """Start contestants, let them work in turns, and yield them when they have."""
    contestants = [start() for start in starts]
    for _ in range(ROUNDS):
        for one in contestants:
            one.round()
    yield contestants
    for one in contestants:
        one.close()


def do(function: Callable[..., None], *arguments: Any) -> list[str]:
    """Return the command that runs a function of a benchmark in a process of its own."""
    return [sys.executable, inspect.getfile(function), "--do", json.dumps([function.__name__, *arguments])]


@dataclass(frozen=True)
class Usage:
    """What a command took.

    Attributes:
        wall_s: from its start to its end.
        cpu_s: user and system seconds of all its processes.
        output: what it printed.
    """

    wall_s: float
    cpu_s: float
    output: str

    def __str__(self) -> str:
        return f"{self.wall_s:.1f} s ({self.cpu_s:.1f} s CPU)"


def used(command: Sequence[str], environ: Mapping[str, str]) -> Usage:
    """Run a command once."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=os.environ | environ, check=True, stdout=subprocess.PIPE, text=True)
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Usage(wall_s, cpu_s, done.stdout)


def resident_bytes(process: int | str = "self") -> int:
    """Return how much memory a process has at the moment."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def row(
    case: str,
    ours: Any,
    peer: Any,
    ratio: float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    """Print one line of the table, or of JSON; without a target the ratio is only to be known."""
    target, verdict = "", ""
    if at_least is not None:
        target, verdict = f">= {at_least}", "met" if ratio >= at_least else "NOT"
    elif at_most is not None:
        target, verdict = f"<= {at_most}", "met" if ratio <= at_most else "NOT"
    if JSON in sys.argv:
        found = {"case": case, "ours": str(ours), "peer": str(peer), "ratio": ratio, "target": target}
        print(json.dumps({**found, "verdict": verdict, "load": os.getloadavg()[0]}), flush=True)
        return
    print(f"{case:<44}{ours!s:>46}{peer!s:>46}{ratio:>7.2f}{target:>9} {verdict}", flush=True)


def main(parts: Mapping[str, Callable[[], None]], functions: Mapping[str, Callable[..., None]]) -> None:
    """Print the table, or be one of the processes that it starts.

    Args:
        parts: what is measured, by name.
        functions: what such a process may be told to do, by name.
    """
    if sys.argv[1:2] == ["--do"]:
        name, *arguments = json.loads(sys.argv[2])
        functions[name](*arguments)
        return
    names = [name for name in sys.argv[1:] if name != JSON] or list(parts)
    if unknown := [name for name in names if name not in parts]:
        raise SystemExit(f"{unknown[0]} is none of {', '.join(parts)}")
    if JSON not in sys.argv:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
        print(f"{'case':<44}{'ours':>46}{'peer':>46}{'ratio':>7}{'target':>9}")
    for name in names:
        parts[name]()
    if JSON not in sys.argv:
        print(f"load {os.getloadavg()[0]:.1f} after, its own included")
