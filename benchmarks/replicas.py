"""What replicas on the bridge cost, beside torch_xla's own CPU client and DistributedDataParallel.

    nox -s bench -- replicas [step] [scaling] [start] [compile] [memory] [--json]

Contestants work in turns, in short rounds, so that what else the machine does hits all of them. Speeds are
those of the best round, with the CPU seconds that a thousand samples took beside them; times are the best of
several starts. A ratio is ours to the peer's in the same run. With --json each row is a JSON line.
"""

from __future__ import annotations

import contextlib
import gc
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
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BATCH = 128
REPLICAS = 4
ROUNDS = 6
ROUND_S = 1.0
"""About how long one round of one contestant lasts, in seconds."""
STARTS = 2
POOL = 4
"""How many host batches a contestant goes through, in turn."""
CLASSES = 10
WORDS, TOKENS, WIDTH = 1000, 64, 128
STEPS = 2000
SETTLED = 200
"""From which step on memory must be flat."""
GIB = 1 << 30
HOST = "127.0.0.1"
JSON = "--json"
START_TIMEOUT_S = 300
"""Longest wait for a contestant's replicas, in seconds."""


# What is trained, on whichever device.


def convnet() -> Any:
    import torch
    from torch import nn

    class MNIST(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(1, 10, kernel_size=5), nn.BatchNorm2d(10)
            self.conv2, self.bn2 = nn.Conv2d(10, 20, kernel_size=5), nn.BatchNorm2d(20)
            self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, CLASSES)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            f = nn.functional
            hidden = self.bn1(f.relu(f.max_pool2d(self.conv1(images), 2)))
            hidden = self.bn2(f.relu(f.max_pool2d(self.conv2(hidden), 2)))
            hidden = f.relu(self.fc1(torch.flatten(hidden, 1)))
            return f.log_softmax(self.fc2(hidden), dim=1)

    return MNIST()


def images(batch: int) -> list[Any]:
    import torch

    return [
        (torch.randn(batch, 1, 28, 28), torch.randint(CLASSES, (batch,), dtype=torch.int64))
        for _ in range(POOL)
    ]


def block() -> Any:
    """One pre-norm transformer block with its activations written out, which is what fusion is for."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            rows, tokens, _ = words.shape
            parts = self.qkv(self.norm1(words)).view(rows, tokens, 3, 4, WIDTH // 4)
            q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
            weights = torch.softmax(q @ k.transpose(-1, -2) / (WIDTH // 4) ** 0.5, dim=-1)
            mixed = (weights @ v).transpose(1, 2).reshape(rows, tokens, WIDTH)
            words = words + self.out(mixed)
            hidden = self.up(self.norm2(words))
            hidden = 0.5 * hidden * (1 + torch.tanh(0.79788456 * (hidden + 0.044715 * hidden**3)))
            words = words + self.down(hidden)
            return torch.log_softmax(self.head(words.mean(1)), dim=1)

    return Block()


def sentences(batch: int) -> list[Any]:
    import torch

    return [
        (torch.randn(batch, TOKENS, WIDTH), torch.randint(CLASSES, (batch,), dtype=torch.int64))
        for _ in range(POOL)
    ]


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], list[Any]]]] = {
    "convnet": (convnet, images),
    "block": (block, sentences),
}


class Training:
    """One replica's training: `step` takes the next batch.

    Args:
        name: one of `MODELS`.
        batch: samples of this replica in each step.
    """

    def __init__(self, name: str, batch: int, device: Any, wrap: Callable[[Any], Any] | None = None) -> None:
        import torch

        torch.manual_seed(0)
        self.device = device
        self.batches = MODELS[name][1](batch)
        model = MODELS[name][0]().train().to(device)
        self.model = wrap(model) if wrap else model
        self.loss = torch.nn.NLLLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        self.steps = 0

    def backward(self) -> Any:
        """Go once forward and back; return the loss."""
        inputs, target = self.batches[self.steps % POOL]
        self.steps += 1
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs.to(self.device)), target.to(self.device))
        loss.backward()
        return loss


class XlaTraining(Training):
    """Trains through torch_xla.

    Args:
        model: one of `MODELS`.
        batch: samples of this replica in each step.
        read_every: after how many steps the program looks at the loss; 0 for never.
    """

    def __init__(self, model: str, batch: int, read_every: int = 0) -> None:
        import torch_xla

        super().__init__(model, batch, torch_xla.device())
        self.read_every = read_every

    def run(self, steps: int) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm

        for _ in range(steps):
            loss = self.backward()
            xm.optimizer_step(self.optimizer)
            torch_xla.sync()
            if self.read_every and self.steps % self.read_every == 0:
                loss.item()
        xm.wait_device_ops()


class DdpTraining(Training):
    def __init__(self, model: str, batch: int) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(model, batch, torch.device("cpu"), DistributedDataParallel)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()


# How contestants are started: each replica connects to this process, and runs the steps it is told to.


def serve(training: XlaTraining | DdpTraining, port: int) -> None:
    with Connection(socket.create_connection((HOST, port)).detach()) as pipe:
        while (steps := _received(pipe)) is not None:
            started, used_s = time.perf_counter(), time.process_time()
            training.run(steps)
            pipe.send((os.getpid(), time.perf_counter() - started, time.process_time() - used_s))


def _received(pipe: Connection) -> int | None:
    try:
        steps: int | None = pipe.recv()
    except EOFError:
        return None
    return steps


def native(model: str, batch: int, port: int) -> None:
    serve(XlaTraining(model, batch), port)


def bridged(model: str, batch: int, port: int) -> None:
    import polyxla

    polyxla.launch(partial(_in_replica, model, batch, port), runtime="pjrt")


def _in_replica(model: str, batch: int, port: int, replica: Any) -> None:
    serve(XlaTraining(model, batch), port)


def ddp(model: str, batch: int, port: int) -> None:
    import torch.multiprocessing

    from polyxla_pjrt.layout import free_ports

    torch.multiprocessing.spawn(_be_ddp, (model, batch, port, free_ports(1)[0]), REPLICAS)


def _be_ddp(rank: int, model: str, batch: int, port: int, store: int) -> None:
    import torch

    # As torchrun does it: more threads than cores only stand in each other's way.
    torch.set_num_threads(1)
    meeting = f"tcp://{HOST}:{store}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=REPLICAS)
    serve(DdpTraining(model, batch), port)
    torch.distributed.destroy_process_group()


def one_step(rank: int) -> None:
    """What a process of a bare spawn does."""
    XlaTraining("convnet", BATCH).run(1)


def bare_spawn(processes: int) -> None:
    import torch.multiprocessing

    torch.multiprocessing.spawn(one_step, (), processes)


def launch_once(processes: int) -> None:
    import polyxla

    polyxla.launch(_first_step, devices=processes, runtime="pjrt")


def _first_step(replica: Any) -> None:
    XlaTraining("convnet", BATCH).run(1)


def compile_once() -> None:
    import polyxla

    print(json.dumps(polyxla.launch(_compile_seconds, runtime="pjrt")))


def _compile_seconds(replica: Any) -> float:
    from torch_xla.debug import metrics

    XlaTraining("block", BATCH).run(3)
    found: tuple[int, float, Any] = metrics.metric_data("CompileTime")
    return found[1] / 1e9


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory() -> None:
    """Print resident bytes and the number of live buffers, every `SETTLED` steps, as JSON."""
    from polyxla_bridge.jax_engine import JaxEngine

    training = XlaTraining("convnet", BATCH)
    (engine,) = (one for one in gc.get_objects() if isinstance(one, JaxEngine))
    client = engine._clients._clients[0]  # noqa: SLF001  (nobody but this needs to count arrays)
    seen = []
    for _ in range(STEPS // SETTLED):
        training.run(SETTLED)
        gc.collect()
        # What was given up is let go of on a thread of the bridge's.
        time.sleep(0.5)
        seen.append((resident_bytes(), len(client.live_arrays())))
    print(json.dumps(seen))


def round_trip() -> None:
    """Print how many bytes a tensor of one GiB takes at the peak, beyond those the program has, as JSON."""
    import torch
    import torch_xla

    device = torch_xla.device()
    torch.ones(8).to(device).cpu()
    host = torch.ones(GIB // 4)
    before = resident_bytes()
    there = host.to(device)
    torch_xla.core.xla_model.wait_device_ops()
    # The copy on the device is the program's wish, and so is the one that comes back.
    up = peak_bytes() - before - GIB
    back = there.cpu()
    down = peak_bytes() - before - 2 * GIB
    assert back.numel() == host.numel()
    print(json.dumps([up, down]))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# What this process does: start contestants, let them work in turns, print what came of it.


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


def processes(count: int) -> dict[str, str]:
    """Choose that many replicas on the bridge, a process each."""
    return {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(count)}


def threads(count: int) -> dict[str, str]:
    """Choose that many replicas on the bridge, in one process."""
    return processes(count) | {"POLYXLA_PJRT_PROCESSES": "1"}


def one_bridged() -> dict[str, str]:
    """Choose one replica, on the bridge."""
    from polyxla_pjrt.layout import Layout, Plan

    return Plan("CPU", Layout()).whole(os.cpu_count() or 1)


NATIVE = {"PJRT_DEVICE": "CPU"}


def measure_step() -> None:
    """One replica on the bridge against torch_xla's own client."""
    with contest(
        partial(Contestant, native, "convnet", BATCH, 1, one_bridged()),
        partial(Contestant, native, "convnet", BATCH, 1, NATIVE),
    ) as (ours, peer):
        row("step: 1 replica / native", ours, peer, ours.best / peer.best, at_least=0.95)


def measure_scaling() -> None:
    """Four replicas against the native client with as many samples, and against DistributedDataParallel."""
    cases = (("convnet", BATCH, 0.85, None), ("block", BATCH, None, 1.0))
    for model, batch, of_native, of_ddp in cases:
        with contest(
            partial(Contestant, bridged, model, batch, REPLICAS, processes(REPLICAS)),
            partial(Contestant, bridged, model, batch, REPLICAS, threads(REPLICAS)),
            partial(Contestant, native, model, batch * REPLICAS, 1, NATIVE),
            partial(Contestant, ddp, model, batch, REPLICAS, {}),
        ) as (forked, threaded, peer, parallel):
            for what, ours in (("processes", forked), ("threads", threaded)):
                name = f"scaling: {model}, 4 {what}"
                row(f"{name} / native", ours, peer, ours.best / peer.best, at_least=of_native)
                row(f"{name} / DDP", ours, parallel, ours.best / parallel.best, at_least=of_ddp)


def measure_start() -> None:
    """From the command to the end of one step of each replica."""
    ways = {
        "4": (launch_once, REPLICAS),
        "8": (launch_once, 2 * REPLICAS),
        "bare": (bare_spawn, REPLICAS),
    }
    took: dict[str, list[Usage]] = {name: [] for name in ways}
    for _ in range(STARTS):
        for name, (function, count) in ways.items():
            took[name].append(used(do(function, count), NATIVE))
    best = {name: min(found, key=lambda one: one.wall_s) for name, found in took.items()}
    four, eight, bare = (best[name] for name in ways)
    row("start: 4 processes / bare spawn of 4", four, bare, four.wall_s / bare.wall_s, at_most=0.55)
    row("start: 8 processes / 4", eight, four, eight.wall_s / four.wall_s, at_most=1.3)


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


def measure_compile() -> None:
    """Seconds in the compiler of the slowest replica: all but one wait there for the one that compiles."""
    runs: dict[str, list[float]] = {"one": [], "four": []}
    for _ in range(STARTS):
        runs["one"].append(sum(json.loads(used(do(compile_once), one_bridged()).output)))
        runs["four"].append(max(json.loads(used(do(compile_once), processes(REPLICAS)).output)))
    one, four = (min(runs[name]) for name in ("one", "four"))
    row("compile: 4 replicas / 1", f"{four:.2f} s", f"{one:.2f} s", four / one, at_most=1.3)


def measure_memory() -> None:
    """Whether memory grows over the steps, and how many copies a transfer makes."""
    seen = json.loads(used(do(memory), one_bridged()).output)
    resident, buffers = zip(*seen, strict=True)
    most, least = max(resident), resident[0]
    case = f"memory: resident after {STEPS} steps / {SETTLED}"
    row(case, f"{most >> 20} MiB", f"{least >> 20} MiB", most / least, at_most=1.03)
    most, least = max(buffers), min(buffers)
    row("memory: live buffers, most / least", most, least, most / least, at_most=1.0)
    for way, extra in zip(
        ("to", "from"), json.loads(used(do(round_trip), one_bridged()).output), strict=True
    ):
        row(
            f"memory: extra copies of 1 GiB {way} device",
            f"{extra >> 20} MiB",
            "1024 MiB",
            extra / GIB,
            at_most=1.01,
        )


PARTS = {
    "step": measure_step,
    "scaling": measure_scaling,
    "start": measure_start,
    "compile": measure_compile,
    "memory": measure_memory,
}


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


if __name__ == "__main__":
    main(PARTS, globals())
