"""Cost of training with polyxla: the loop, the sampler, the checkpoints.

    nox -s bench -- training [steps] [watch] [sampler] [checkpoint] [--quick] [--json]

``steps`` compares `polyxla_training.Trainer` with the loop of torch_xla's guides and with the loops of
Lightning and Accelerate. Each runs in a new process; they take turns in training a block of steps, so that
other load on the machine affects all of them equally. Beside the times are the executions, transfers and
compilations per step beyond those of the plain loop. ``watch`` compares a loop of `polyxla.launch` with the
same loop under ``POLYXLA_OBSERVE=off``. ``sampler`` compares with
`torch.utils.data.DistributedSampler`, ``checkpoint`` with the writer of safetensors. With --json each row
is a JSON line; --quick only checks that everything works.
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
"""Number of comparisons of the samplers."""
STARTS = 1 if IS_QUICK else 4
"""Number of starts of all loops: a process can be a few per cent faster because of its memory layout."""
BLOCKS, STEPS = (2, 40) if IS_QUICK else (15, 40)
"""Per start. A block takes half a second: a machine's speed drifts, but not between consecutive blocks."""
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
"""The contestants, each with the target for its ratio to the plain loop: at most this; None for no target."""
WATCHED_AT_MOST = 1.02
"""Target for the ratio of a watched loop to an unwatched one, in the median over pairs of blocks."""

SHARDS, INDEX_BATCH = 8, 128
MANY, FEW = (1_000_000, 100_000) if IS_QUICK else (100_000_000, 1_000_000)
"""Records of a dataset for which DistributedSampler is slow, and of one for which it is not."""
DRAWN = 2 * FEW
"""Number of indices to draw for measuring speed."""
SOONER, MAX_MIB = 1000, 1
SAMPLERS = ("ShardedSampler", "DistributedSampler")
"""Our sampler and its peer."""


# The loops.


@dataclass
class Loop:
    """One contestant over all starts.

    Attributes:
        step_ms: time of a step, one for each block.
        counts: operations per step after the last start, by name.
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
    """A process that trains on request.

    Args:
        name: one of the loops in contestants/loops.py.
        environ: overrides variables of the environment.
    """

    def __init__(self, name: str, environ: Mapping[str, str] = NATIVE) -> None:
        with socket.create_server((HOST, 0)) as listener:
            listener.settimeout(START_TIMEOUT_S)
            port = listener.getsockname()[1]
            command = [sys.executable, str(LOOPS), name, *map(str, (port, BLOCKS, STEPS))]
            self._process = subprocess.Popen(command, env=os.environ | environ)
            self._pipe = Connection(listener.accept()[0].detach())

    def take(self) -> float:
        """Train one block; return the seconds per step."""
        self._pipe.send(None)
        step_s: float = self._pipe.recv()
        return step_s

    def end(self) -> dict[str, float]:
        """End the process; return its operations per step since its first turn."""
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
    show("steps", [_compared_loop(name, loop, loops[PEER]) for name, loop in loops.items()])


def _compared_loop(name: str, loop: Loop, peer: Loop) -> dict[str, Any]:
    ratios = {f"min / {PEER}'s": loop.least / peer.least, f"median / {PEER}'s": loop.median / peer.median}
    more = {f"+ {what}": count - peer.counts[what] for what, count in loop.counts.items()}
    most = AT_MOST[name]
    is_met = most is not None and max(ratios.values()) <= most and not any(more.values())
    wanted = target(is_met, f"<= {most}, + 0") if most else {"target": None, "verdict": None}
    return {"loop": name, "min, ms": loop.least, "median, ms": loop.median, **ratios, **more, **wanted}


def measure_watch() -> None:
    """Print the cost of watching a user's own loop, block against block."""
    loops = {value: Loop() for value in ("on", "off")}
    for number in range(1, STARTS + 1):
        turns = {value: Turns("own loop", {**NATIVE, "POLYXLA_OBSERVE": value}) for value in loops}
        for block in range(BLOCKS):
            # Either is first in half of the pairs.
            for value in sorted(loops, reverse=block % 2 == 1):
                loops[value].step_ms.append(turns[value].take() * 1e3)
        for value, loop in loops.items():
            loop.counts = turns[value].end()
        print(
            f"start {number} of {STARTS}, median of the pairs so far: {_paired(loops):.4f}", file=sys.stderr
        )
    watched, unwatched = loops["on"], loops["off"]
    more = {f"+ {what}": count - unwatched.counts[what] for what, count in watched.counts.items()}
    # The loss is read at every 50th step.
    is_met = _paired(loops) <= WATCHED_AT_MOST and not more["+ executions"] and not more["+ compiles"]
    times = {"watched, median ms": watched.median, "unwatched, median ms": unwatched.median}
    ratios = {"median of pairs": _paired(loops), "min / min": watched.least / unwatched.least}
    wanted = target(is_met, f"<= {WATCHED_AT_MOST}, + 0 executions, compiles")
    show("watch", [{"loop": "own loop, watched / unwatched", **times, **ratios, **more, **wanted}])


def _paired(loops: Mapping[str, Loop]) -> float:
    return statistics.median(
        on / off for on, off in zip(loops["on"].step_ms, loops["off"].step_ms, strict=True)
    )


# The samplers, each in a separate process.


def sampler(name: str, records: int, shards: int) -> Any:
    """Return one shard's sampler of a dataset of that many records."""
    from torch.utils.data import DistributedSampler

    from polyxla_sampler import ShardedSampler

    made = {"ShardedSampler": ShardedSampler, "DistributedSampler": DistributedSampler}[name]
    return made(range(records), shards, 0)


def begin(name: str, records: int, count: int) -> None:
    """Print the seconds to the first index, and the rise of peak memory while drawing, in MiB, as JSON."""
    made = _made(name, records)
    # Source: proc_pid_clear_refs(5): 5 resets VmHWM to the current use.
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water_mib() - file_mib()
    started = time.perf_counter()
    drawn = iter(made)
    next(drawn)
    first_s = time.perf_counter() - started
    deque(islice(drawn, count), maxlen=0)
    print(json.dumps([first_s, high_water_mib() - file_mib() - before]))


def file_mib() -> float:
    """Return this process's memory in pages of files, in MiB: the code of libraries, not data."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssFile:"))


def traced(name: str, records: int, count: int) -> None:
    """Print the peak memory of Python objects while indices are drawn, in MiB, as JSON."""
    made = _made(name, records)
    tracemalloc.start()
    deque(islice(made, count), maxlen=0)
    print(json.dumps(tracemalloc.get_traced_memory()[1] / (1 << 20)))


def _made(name: str, records: int) -> Any:
    # A first run, so that torch's one-time work is not measured.
    list(sampler(name, SHARDS, SHARDS))
    return sampler(name, records, SHARDS)


def draw(name: str, records: int, count: int, shards: int) -> None:
    """Print a DataLoader's indices per second, with and without each epoch's first batch, as JSON."""
    from torch.utils.data import DataLoader

    list(sampler(name, shards, shards))
    order = sampler(name, records, shards)
    loader: DataLoader[int] = DataLoader(range(records), INDEX_BATCH, sampler=order)  # type: ignore[arg-type]
    batches: Any = loader.batch_sampler
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
        first | target(sooner >= SOONER, f"{SOONER} times as fast: {sooner:,.0f}"),
        memory | target(memory["ours"] < MAX_MIB, f"< {MAX_MIB} MiB"),
        {"figure": "MiB of Python objects, drawing", "ours": python_mib},
    ]
    for shards in (SHARDS, 1):
        drawn = alternated(draw, FEW, DRAWN, shards)
        whole = compared(f"indices/s, {FEW:,} records / {shards}", drawn, 0, max)
        rows.append(whole | target(whole["ours"] >= whole["peer"], "not slower"))
        rows.append(compared("the same, without the first batch", drawn, 1, max))
    show("sampler", rows)


def alternated(function: Callable[..., None], *arguments: Any) -> dict[str, list[list[float]]]:
    """Run a function for both samplers in turns; return the printed numbers of each round, by sampler."""
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
        figure: name of the row.
        found: the printed numbers of each round, by sampler.
        at: index of the number to compare.
        best: selects the best of several; for memory the largest.
    """
    ours, peer = ([times[at] for times in found[name]] for name in SAMPLERS)
    middle = {"median": statistics.median(ours), "peer's median": statistics.median(peer)}
    return {"figure": figure, "ours": best(ours), "peer": best(peer), **middle}


def target(is_met: bool, wanted: str) -> dict[str, Any]:
    return {"target": wanted, "verdict": "met" if is_met else "NOT"}


# Output.


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with the columns of the first row, or JSON lines."""
    if JSON in sys.argv:
        for row in rows:
            print(json.dumps({"part": title, **row, "load": os.getloadavg()[0]}), flush=True)
        return
    table = Table(*rows[0], title=f"{title}, load {os.getloadavg()[0]:.1f}")
    for row in rows:
        table.add_row(*(_shown(row.get(column)) for column in rows[0]))
    # At least this wide, so that no column is dropped on a narrow terminal or without one.
    Console(width=max(160, Console().width)).print(table)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


PARTS = {
    "steps": measure_steps,
    "watch": measure_watch,
    "sampler": measure_sampler,
    "checkpoint": checkpoint_files.main,
}


def main() -> None:
    """Print the requested tables; in a process that this started, run one function instead."""
    if sys.argv[1:2] == ["--do"]:
        name, *arguments = json.loads(sys.argv[2])
        functions: dict[str, Callable[..., None]] = {"begin": begin, "traced": traced, "draw": draw}
        functions[name](*arguments)
        return
    names = [name for name in sys.argv[1:] if name not in {JSON, QUICK}] or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        raise SystemExit(f"{unknown[0]!r} is not one of {', '.join(PARTS)}")
    for name in names:
        PARTS[name]()


if __name__ == "__main__":
    main()
