"""Speed of TorchTPU on the bridge, compared with torch on the CPU.

    nox -s bench-torchtpu -- [eager] [compiled] [ddp] [start] [--json]

Contestants take turns in short rounds, so that other load on the machine affects all of them equally. A
speed is that of the best round, with the CPU time of a thousand samples beside it; a time is the best of
several starts. A ratio is that of the times of a step, unless a row says otherwise: ours to the peer's in
the same run. The peer of a compiled step is the faster of two: compiled and eager on the CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from harness import Contestant, Usage, contest, do, main, row, used
from replicas import REPLICAS, STARTS, ddp
from trainings import BATCH, DdpTraining, TorchTraining, serve

ONE, FOUR = {"POLYXLA_EMULATE": "v5e-1"}, {"POLYXLA_EMULATE": f"v5e-{REPLICAS}"}
PLAIN = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""For a program on the CPU: otherwise torch would load TorchTPU where it finds a chip."""


# The contestants: each replica connects to the benchmark's process and runs steps on request.


def eager_on_tpu(model: str, batch: int, port: int) -> None:
    serve(TorchTraining(model, batch, "tpu"), port)


def compiled_on_tpu(model: str, batch: int, port: int) -> None:
    serve(TorchTraining(model, batch, "tpu", is_compiled=True), port)


def eager(model: str, batch: int, port: int) -> None:
    serve(TorchTraining(model, batch), port)


def compiled(model: str, batch: int, port: int) -> None:
    serve(TorchTraining(model, batch, is_compiled=True), port)


def ddp_on_tpu(model: str, batch: int, port: int) -> None:
    import polyxla

    polyxla.launch(partial(_in_replica, model, batch, port), runtime="torchtpu")


def _in_replica(model: str, batch: int, port: int, replica: Any) -> None:
    serve(DdpTraining(model, batch, "tpu"), port)


def launch_once() -> None:
    import polyxla

    polyxla.launch(_first_step, runtime="torchtpu")


def _first_step(replica: Any) -> None:
    DdpTraining("block", BATCH, "tpu").run(1)


def first_step() -> None:
    """Train one step in a process of torchrun."""
    import torch

    torch.distributed.init_process_group("gloo")
    DdpTraining("block", BATCH).run(1)
    torch.distributed.destroy_process_group()


# This process starts the contestants, runs their turns and prints the results.


def measure_eager() -> None:
    """Compare one eager step with that of the CPU."""
    with contest(
        partial(Contestant, eager_on_tpu, "convnet", BATCH, 1, ONE),
        partial(Contestant, eager, "convnet", BATCH, 1, PLAIN),
    ) as (ours, peer):
        row("eager: convnet / CPU", ours, peer, peer.beside(ours))


def measure_compiled() -> None:
    """Compare a step compiled by torch.compile with that of the CPU."""
    for model in ("convnet", "block"):
        with contest(
            partial(Contestant, compiled_on_tpu, model, BATCH, 1, ONE),
            partial(Contestant, compiled, model, BATCH, 1, PLAIN),
            partial(Contestant, eager, model, BATCH, 1, PLAIN),
        ) as (ours, same, plain):
            faster = max(same, plain, key=lambda peer: peer.best)
            for what, peer in (("compiled", same), ("eager", plain), ("the faster", faster)):
                row(f"compiled: {model} / CPU, {what}", ours, peer, peer.beside(ours))


def measure_ddp() -> None:
    """Compare four replicas with four processes of gloo, by their samples per second."""
    with contest(
        partial(Contestant, ddp_on_tpu, "block", BATCH, REPLICAS, FOUR),
        partial(Contestant, ddp, "block", BATCH, REPLICAS, PLAIN),
    ) as (ours, peer):
        row("ddp: block, 4 replicas / gloo (samples/s)", ours, peer, ours.beside(peer))


def measure_start() -> None:
    """Measure the time from the command to the end of the first step of all replicas."""
    python, *program = do(first_step)
    torchrun = [python, "-m", "torch.distributed.run", f"--nproc-per-node={REPLICAS}", *program]
    ways = {"ours": (do(launch_once), FOUR), "torchrun": (torchrun, PLAIN)}
    took: dict[str, list[Usage]] = {name: [] for name in ways}
    for _ in range(STARTS):
        for name, (command, environ) in ways.items():
            took[name].append(used(command, environ))
    ours, peer = (min(found, key=lambda run: run.wall_s) for found in took.values())
    row("start: 4 replicas / torchrun with gloo", ours, peer, ours.wall_s / peer.wall_s)


PARTS = {
    "eager": measure_eager,
    "compiled": measure_compiled,
    "ddp": measure_ddp,
    "start": measure_start,
}


if __name__ == "__main__":
    main(PARTS, globals())
