"""What training with polyxla costs: its loop, its sampler, its checkpoints.

    nox -s bench -- training [steps] [sampler] [checkpoint] [--quick] [--json]

``steps`` compares `polyxla_training.Trainer` with the loop of torch_xla's guides, and with those of Lightning and
Accelerate: fresh processes, each of which trains a block of steps when it is its turn, so that what else the
machine does hits all of them. Beside the times are the executions, transfers and compilations of a step that
the plain loop does not have.
``sampler`` compares with `torch.utils.data.DistributedSampler`, ``checkpoint`` with safetensors' own writer.
With --json each row is a JSON line; --quick only shows that everything works.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import checkpoint_files
from checkpoint_files import high_water_mib
from harness import HOST, NATIVE, START_TIMEOUT_S, do
from rich.console import Console
from rich.table import Table

JSON, QUICK = "--json", "--quick"
IS_QUICK = QUICK in sys.argv
ROUNDS = 1 if IS_QUICK else 3
"""How often samplers are compared."""
STARTS = 1 if IS_QUICK else 4
"""How often all loops are started anew: by where its memory lies, one process is some per cent faster."""
BLOCKS, STEPS = (2, 40) if IS_QUICK else (15, 40)
"""Of a start. Half a second each, because a machine's speed drifts: neighbours see the same of it."""
LOOPS = Path(__file__).parent / "contestants" / "loops.py"
PEER = "plain"
AT_MOST: Mapping[str, float | None] = {
    PEER: None,
    "Trainer": 1.02,
    "Trainer, logged": 1.04,
    "launch": None,
    "Lightning": None,
    "Accelerate": None,
}
"""The contestants, each with the largest ratio to the plain loop that it should have, where there is one."""

SHARDS, INDEX_BATCH = 8, 128
MANY, FEW = (1_000_000, 100_000) if IS_QUICK else (100_000_000, 1_000_000)
"""Records: of a dataset that DistributedSampler takes long for, and of one that it does not."""
DRAWN = 2 * FEW
"""Indices that are drawn where speed is measured."""
SOONER, MAX_MIB = 1000, 1
SAMPLERS = ("ShardedSampler", "DistributedSampler")
"""Ours, and its peer."""


# The loops.


@dataclass
class Loop:
    """One contestant over all starts.

    Attributes:
        step_ms: of a step, one for each block.
        counts: how often it did what is counted, in a step after the last start.
    """

    step_ms: list[float] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def least(self) -> float:
        return min(self.step_ms)

    @property
    def median(self) -> float:
        return statistics.median(self.step_ms)


class Turns:
    """A process that trains when it is told to.

    Args:
        name: one of `AT_MOST`.
    """

    def __init__(self, name: str) -> None:
        with socket.create_server((HOST, 0)) as listener:
            listener.settimeout(START_TIMEOUT_S)
            port = listener.getsockname()[1]
            command = [sys.executable, str(LOOPS), name, *map(str, (port, BLOCKS, STEPS))]
            self._process = subprocess.Popen(command, env=os.environ | NATIVE)
            self._pipe = Connection(listener.accept()[0].detach())

    def take(self) -> float:
        """Let it train a block; return the seconds of a step."""
        self._pipe.send(None)
        step_s: float = self._pipe.recv()
        return step_s

    def end(self) -> dict[str, float]:
        """Return what it counted in a step from its first turn on, when it has ended."""
        self._pipe.send(None)
        counts: dict[str, float] = self._pipe.recv()
        if self._process.wait(START_TIMEOUT_S):
            raise SystemExit(f"a contestant ended with {self._process.returncode}")
        return counts


def measure_steps() -> None:
    loops = {name: Loop() for name in AT_MOST}
    for number in range(1, STARTS + 1):
        turns = {name: Turns(name) for name in loops}
        for _ in range(BLOCKS):
            for name, loop in loops.items():
                loop.step_ms.append(turns[name].take() * 1e3)
        for name, loop in loops.items():
            loop.counts = turns[name].end()
        print(
            f"start {number} of {STARTS}, median ms a step so far:",
            ", ".join(f"{name} {loop.median:.2f}" for name, loop in loops.items()),
            file=sys.stderr,
        )
    tell("steps", [_compared_loop(name, loop, loops[PEER]) for name, loop in loops.items()])


def _compared_loop(name: str, loop: Loop, peer: Loop) -> dict[str, Any]:
    ratios = {f"min / {PEER}'s": loop.least / peer.least, f"median / {PEER}'s": loop.median / peer.median}
    more = {f"+ {what}": count - peer.counts[what] for what, count in loop.counts.items()}
    most = AT_MOST[name]
    is_met = most is not None and max(ratios.values()) <= most and not any(more.values())
    wanted = target(is_met, f"<= {most}, + 0") if most else {"target": None, "verdict": None}
    return {"loop": name, "min, ms": loop.least, "median, ms": loop.median, **ratios, **more, **wanted}


# The samplers, each in a process of its own.


def sampler(name: str, records: int, shards: int) -> Any:
    """Return one shard's sampler, of a dataset that is nothing but its length."""
    from torch.utils.data import DistributedSampler

    from polyxla_sampler import ShardedSampler

    made = {"ShardedSampler": ShardedSampler, "DistributedSampler": DistributedSampler}[name]
    return made(range(records), shards, 0)


def begin(name: str, records: int, count: int) -> None:
    """Print the seconds to the first index, and by how many MiB drawing raises the peak memory, as JSON."""
    made = _made(name, records)
    # Source: proc_pid_clear_refs(5): 5 sets VmHWM to what is used now.
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water_mib() - file_mib()
    started = time.perf_counter()
    drawn = iter(made)
    next(drawn)
    first_s = time.perf_counter() - started
    deque(islice(drawn, count), maxlen=0)
    print(json.dumps([first_s, high_water_mib() - file_mib() - before]))


def file_mib() -> float:
    """Return how much of this process's memory is pages of files: libraries' code, and nobody's data."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssFile:"))


def traced(name: str, records: int, count: int) -> None:
    """Print how many MiB Python's own objects take at the peak, while indices are drawn, as JSON."""
    made = _made(name, records)
    tracemalloc.start()
    deque(islice(made, count), maxlen=0)
    print(json.dumps(tracemalloc.get_traced_memory()[1] / (1 << 20)))


def _made(name: str, records: int) -> Any:
    # What torch does for the first time is not the sampler's.
    list(sampler(name, SHARDS, SHARDS))
    return sampler(name, records, SHARDS)


def draw(name: str, records: int, count: int, shards: int) -> None:
    """Print the indices a second of a DataLoader's batches, with and without each epoch's first, as JSON."""
    from torch.utils.data import DataLoader

    list(sampler(name, shards, shards))
    batches = DataLoader(range(records), INDEX_BATCH, sampler=sampler(name, records, shards)).batch_sampler  # type: ignore[arg-type,var-annotated]
    whole_s = later_s = 0.0
    drawn = 0
    while drawn < count:
        started = time.perf_counter()
        epoch = iter(batches)
        drawn += len(next(epoch))
        first = time.perf_counter()
        drawn += sum(map(len, epoch))
        ended = time.perf_counter()
        whole_s, later_s = whole_s + ended - started, later_s + ended - first
    print(json.dumps([drawn / whole_s, drawn / later_s]))


def measure_sampler() -> None:
    begun = alternated(begin, MANY, DRAWN)
    python_mib = max(json.loads(output(traced, SAMPLERS[0], MANY, DRAWN)) for _ in range(ROUNDS))
    first = compared("s to the first index", begun, 0, min)
    sooner = first["peer"] / first["ours"]
    memory = compared("MiB, drawing", begun, 1, max)
    rows = [
        first | target(sooner >= SOONER, f"{SOONER} times sooner: {sooner:,.0f}"),
        memory | target(memory["ours"] < MAX_MIB, f"< {MAX_MIB} MiB"),
        {"figure": "MiB of Python objects, drawing", "ours": python_mib},
    ]
    for shards in (SHARDS, 1):
        drawn = alternated(draw, FEW, DRAWN, shards)
        whole = compared(f"indices/s, {FEW:,} records / {shards}", drawn, 0, max)
        rows.append(whole | target(whole["ours"] >= whole["peer"], "not slower"))
        rows.append(compared("the same, first batch left out", drawn, 1, max))
    tell("sampler", rows)


def alternated(function: Callable[..., None], *arguments: Any) -> dict[str, list[list[float]]]:
    """Run a function for both samplers in turn; return what it printed in every round, by sampler."""
    found: dict[str, list[list[float]]] = {name: [] for name in SAMPLERS}
    for _ in range(ROUNDS):
        for name, outputs in found.items():
            outputs.append(json.loads(output(function, name, *arguments)))
    return found


def output(function: Callable[..., None], *arguments: Any) -> str:
    return subprocess.run(do(function, *arguments), check=True, stdout=subprocess.PIPE, text=True).stdout


def compared(
    figure: str, found: Mapping[str, list[list[float]]], at: int, best: Callable[[Sequence[float]], float]
) -> dict[str, Any]:
    """Return a row with the best and the median over the rounds.

    Args:
        figure: what it shows.
        found: what was printed in every round, by sampler.
        at: which number of those.
        best: takes the best of several, or of memory the most.
    """
    ours, peer = ([one[at] for one in found[name]] for name in SAMPLERS)
    middle = {"median": statistics.median(ours), "peer's median": statistics.median(peer)}
    return {"figure": figure, "ours": best(ours), "peer": best(peer), **middle}


def target(is_met: bool, wanted: str) -> dict[str, Any]:
    return {"target": wanted, "verdict": "met" if is_met else "NOT"}


# What is shown.


def tell(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table, whose columns are those of the first row, or JSON lines."""
    if JSON in sys.argv:
        for row in rows:
            print(json.dumps({"part": title, **row, "load": os.getloadavg()[0]}), flush=True)
        return
    table = Table(*rows[0], title=f"{title}, load {os.getloadavg()[0]:.1f}")
    for row in rows:
        table.add_row(*(_shown(row.get(column)) for column in rows[0]))
    # A terminal may be narrow, or none: no column is left out for that.
    Console(width=max(160, Console().width)).print(table)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


PARTS = {"steps": measure_steps, "sampler": measure_sampler, "checkpoint": checkpoint_files.main}


def main() -> None:
    """Print what was asked for, or be one of the processes that this starts."""
    if sys.argv[1:2] == ["--do"]:
        name, *arguments = json.loads(sys.argv[2])
        {"begin": begin, "traced": traced, "draw": draw}[name](*arguments)
        return
    names = [name for name in sys.argv[1:] if name not in {JSON, QUICK}] or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        raise SystemExit(f"{unknown[0]} is none of {', '.join(PARTS)}")
    for name in names:
        PARTS[name]()


if __name__ == "__main__":
    main()
