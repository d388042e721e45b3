"""Cost of replicas on the bridge, compared with torch_xla's CPU client and DistributedDataParallel.

    nox -s bench -- replicas [step] [plugin] [scaling] [collectives] [agreement] [start] [spmd] [compile]
        [memory] [jax] [--json]

Contestants take turns in short rounds, so that other load on the machine affects all of them equally. A
speed is that of the best round, with the CPU time of a thousand samples beside it; a time is the best of
several starts. A ratio is ours to the peer's in the same run. With --json each row is a JSON line.
"""

from __future__ import annotations

import gc
import json
import resource
import time
from functools import partial
from typing import Any

from harness import HOST, NATIVE, Contestant, Usage, contest, do, main, resident_bytes, row, used
from trainings import BATCH, DdpTraining, JaxTraining, SpmdTraining, TorchSum, XlaSum, XlaTraining, serve

REPLICAS = 4
STARTS = 2
COMPILATIONS = 4
STEPS = 2000
SETTLED = 200
"""Memory must not grow after this step."""
GIB = 1 << 30
SUM = "sum"
ONE_BRIDGED = {"POLYXLA_EMULATE": "v5e-1"}
"""One chip, so that a program without a launch computes on the bridge."""
EMULATED = {"POLYXLA_EMULATE": "v4-8"}
"""Four chips: four processes of a replica each, or one process with four devices."""


# The contestants: each replica connects to the benchmark's process and runs steps on request.


def native(model: str, batch: int, port: int) -> None:
    serve(XlaTraining(model, batch), port)


def bridged(model: str, batch: int, port: int) -> None:
    import polyxla

    polyxla.launch(partial(_in_replica, model, batch, port), runtime="pjrt")


def _in_replica(model: str, batch: int, port: int, replica: Any) -> None:
    serve(XlaTraining(model, batch), port)


def uncompared(model: str, batch: int, port: int) -> None:
    import polyxla

    polyxla.launch(partial(_in_uncompared_replica, model, batch, port), runtime="pjrt")


def _in_uncompared_replica(model: str, batch: int, port: int, replica: Any) -> None:
    from polyxla_bridge.programs.agreement import Agreement, Program
    from polyxla_bridge.programs.executable import Executable

    def meet(agreement: Agreement, executable: Executable, index: int) -> Program:
        known: dict[int, Program] = executable.native.setdefault("meets", {})
        if index not in known:
            known[index] = agreement.program(executable, index)
        return known[index]

    # There is no switch: only a job whose replicas disagree would need one.
    Agreement.meet = meet  # type: ignore[assignment, method-assign]
    serve(XlaTraining(model, batch), port)


def partitioned(model: str, batch: int, port: int) -> None:
    serve(SpmdTraining(model, batch), port)


def on_jax(platform: str, batch: int, port: int) -> None:
    if platform == "tpu":
        # As in an SPMD program of torch_xla, this process has all chips.
        import torch_xla.runtime as xr

        xr.use_spmd()
        xr.global_runtime_device_count()
    serve(JaxTraining(platform, batch), port)


def summed(what: str, count: int, port: int) -> None:
    import polyxla

    polyxla.launch(partial(_in_summed_replica, count, port), runtime="pjrt")


def _in_summed_replica(count: int, port: int, replica: Any) -> None:
    serve(XlaSum(count), port)


def ddp(model: str, batch: int, port: int) -> None:
    """Train with DistributedDataParallel, or only sum `batch` numbers, on gloo."""
    from torch.multiprocessing.spawn import spawn

    from polyxla.plugin import free_ports

    spawn(_be_ddp, (model, batch, port, free_ports(1)[0]), REPLICAS)


def _be_ddp(rank: int, model: str, batch: int, port: int, store: int) -> None:
    import torch

    # As in torchrun: more threads than cores only slow each other down.
    torch.set_num_threads(1)
    meeting = f"tcp://{HOST}:{store}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=REPLICAS)
    serve(TorchSum(batch) if model == SUM else DdpTraining(model, batch), port)
    torch.distributed.destroy_process_group()


def one_step(rank: int) -> None:
    """Train one step in a process of a bare spawn."""
    XlaTraining("convnet", BATCH).run(1)


def bare_spawn(processes: int) -> None:
    from torch.multiprocessing.spawn import spawn

    spawn(one_step, (), processes)


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

    training = XlaTraining("block", BATCH)
    for _ in range(3):
        # Each run waits for its step, which would otherwise share the cores with the next compilation.
        training.run(1)
    found: tuple[int, float, Any] = metrics.metric_data("CompileTime")
    return found[1] / 1e9


def memory() -> None:
    """Print resident bytes and the number of live buffers, every `SETTLED` steps, as JSON."""
    from polyxla_bridge.engine.jax_engine import JaxEngine

    training = XlaTraining("convnet", BATCH)
    (engine,) = (held for held in gc.get_objects() if isinstance(held, JaxEngine))
    client = engine._clients._clients[0]  # noqa: SLF001  (only this counts arrays)
    seen = []
    for _ in range(STEPS // SETTLED):
        training.run(SETTLED)
        gc.collect()
        # A thread of the bridge releases the buffers.
        time.sleep(0.5)
        seen.append((resident_bytes(), len(client.live_arrays())))
    print(json.dumps(seen))


def round_trip() -> None:
    """Print the extra peak memory of moving 1 GiB to the device and back, in bytes, as JSON."""
    import torch
    import torch_xla

    device = torch_xla.device()
    torch.ones(8).to(device).cpu()
    host = torch.ones(GIB // 4)
    before = resident_bytes()
    there = host.to(device)
    torch_xla.core.xla_model.wait_device_ops()
    # The program keeps the copy on the device, and the copy that comes back.
    up = peak_bytes() - before - GIB
    back = there.cpu()
    down = peak_bytes() - before - 2 * GIB
    assert back.numel() == host.numel()
    print(json.dumps([up, down]))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# This process starts the contestants, runs their turns and prints the results.


def processes(count: int) -> dict[str, str]:
    """Return the variables for that many replicas on the bridge, one process each."""
    return {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(count)}


def threads(count: int) -> dict[str, str]:
    """Return the variables for that many replicas on the bridge, in one process."""
    return processes(count) | {"POLYXLA_PJRT_PROCESSES": "1"}


def measure_step() -> None:
    """Compare one replica on the bridge with torch_xla's client."""
    with contest(
        partial(Contestant, native, "convnet", BATCH, 1, ONE_BRIDGED),
        partial(Contestant, native, "convnet", BATCH, 1, NATIVE),
    ) as (ours, peer):
        row("step: 1 replica / native", ours, peer, ours.best / peer.best)


def measure_plugin() -> None:
    """Compare the bridge on XLA's CPU client as a PJRT plugin with that on jaxlib, and with torch_xla."""
    import lammps_jax_pjrt_cpu

    on_plugin = {"PJRT_DEVICE": "CPU_POLYXLA", "POLYXLA_PJRT_PLUGIN": str(lammps_jax_pjrt_cpu.PLUGIN_PATH)}
    with contest(
        partial(Contestant, native, "convnet", BATCH, 1, on_plugin),
        partial(Contestant, native, "convnet", BATCH, 1, {"PJRT_DEVICE": "CPU_POLYXLA"}),
        partial(Contestant, native, "convnet", BATCH, 1, NATIVE),
    ) as (ours, on_jaxlib, peer):
        row("plugin: 1 replica / on jaxlib", ours, on_jaxlib, ours.best / on_jaxlib.best)
        row("plugin: 1 replica / native", ours, peer, ours.best / peer.best)


def measure_scaling() -> None:
    """Compare four replicas with the native client, for as many samples, and DistributedDataParallel."""
    for model in ("convnet", "block"):
        with contest(
            partial(Contestant, bridged, model, BATCH, REPLICAS, processes(REPLICAS)),
            partial(Contestant, bridged, model, BATCH, REPLICAS, threads(REPLICAS)),
            partial(Contestant, native, model, BATCH * REPLICAS, 1, NATIVE),
            partial(Contestant, ddp, model, BATCH, REPLICAS, {}),
        ) as (forked, threaded, peer, parallel):
            for what, ours in (("processes", forked), ("threads", threaded)):
                name = f"scaling: {model}, 4 {what}"
                row(f"{name} / native", ours, peer, ours.best / peer.best)
                row(f"{name} / DDP", ours, parallel, ours.best / parallel.best)


def measure_collectives() -> None:
    """Compare sums of small and of large arrays, and trainings, with those of torch and jaxlib on gloo."""
    on_gloo = processes(REPLICAS) | {"POLYXLA_SHARED_MEMORY": "off"}
    for size in ("1 KiB", "1 MiB", "32 MiB"):
        count, unit = size.split()
        numbers = int(count) << {"KiB": 8, "MiB": 18}[unit]
        with contest(
            partial(Contestant, summed, SUM, numbers, REPLICAS, processes(REPLICAS)),
            partial(Contestant, summed, SUM, numbers, REPLICAS, on_gloo),
            partial(Contestant, ddp, SUM, numbers, REPLICAS, {}),
        ) as (ours, jaxlib, torch):
            row(f"collectives: {size} / torch on gloo", ours, torch, ours.best / torch.best)
            row(f"collectives: {size} / jaxlib on gloo", ours, jaxlib, ours.best / jaxlib.best)
    for model in ("convnet", "block"):
        with contest(
            partial(Contestant, bridged, model, BATCH, REPLICAS, processes(REPLICAS)),
            partial(Contestant, bridged, model, BATCH, REPLICAS, on_gloo),
        ) as (ours, jaxlib):
            row(f"collectives: {model} / jaxlib on gloo", ours, jaxlib, ours.best / jaxlib.best)


def measure_agreement() -> None:
    """Measure what comparing the replicas' collectives costs."""
    row("agreement: convnet, 4 processes / not compared", *_compared_and_not("convnet"))
    row("agreement: block, 4 processes / not compared", *_compared_and_not("block"))


def _compared_and_not(model: str) -> tuple[Contestant, Contestant, float]:
    with contest(
        partial(Contestant, bridged, model, BATCH, REPLICAS, processes(REPLICAS)),
        partial(Contestant, uncompared, model, BATCH, REPLICAS, processes(REPLICAS)),
    ) as (ours, peer):
        return ours, peer, ours.best / peer.best


def measure_spmd() -> None:
    """Compare one program that is partitioned over four devices with four replicas, for as many samples."""
    row("spmd: convnet, 4 devices / 4 replicas", *_partitioned_and_replicas("convnet"))
    row("spmd: block, 4 devices / 4 replicas", *_partitioned_and_replicas("block"))


def _partitioned_and_replicas(model: str) -> tuple[Contestant, Contestant, float]:
    with contest(
        partial(Contestant, partitioned, model, BATCH * REPLICAS, 1, EMULATED),
        partial(Contestant, bridged, model, BATCH, REPLICAS, EMULATED),
    ) as (ours, peer):
        return ours, peer, ours.best / peer.best


def measure_jax() -> None:
    """Compare a program of JAX on eight emulated chips with the same program on JAX's eight CPU devices."""
    chips = {"POLYXLA_EMULATE": "v5e-8", "JAX_FORCE_TPU_INIT": "1"}
    mesh = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    with contest(
        partial(Contestant, on_jax, "tpu", 8 * 16, 1, chips),
        partial(Contestant, on_jax, "cpu", 8 * 16, 1, mesh),
    ) as (ours, peer):
        row("jax: block, 8 emulated chips / 8 CPU devices", ours, peer, ours.best / peer.best)


def measure_start() -> None:
    """Measure the time from the command to the end of the first step of all replicas."""
    ways = {
        "4": (launch_once, REPLICAS, NATIVE),
        "8": (launch_once, 2 * REPLICAS, NATIVE),
        "emulated": (launch_once, 2 * REPLICAS, {"POLYXLA_EMULATE": "v3-8"}),
        "bare": (bare_spawn, REPLICAS, NATIVE),
    }
    took: dict[str, list[Usage]] = {name: [] for name in ways}
    for _ in range(STARTS):
        for name, (function, count, environ) in ways.items():
            took[name].append(used(do(function, count), environ))
    best = {name: min(found, key=lambda run: run.wall_s) for name, found in took.items()}
    four, eight, emulated, bare = (best[name] for name in ways)
    row("start: 4 processes / bare spawn of 4", four, bare, four.wall_s / bare.wall_s)
    row("start: 8 processes / 4", eight, four, eight.wall_s / four.wall_s)
    row("start: an emulated v3-8 / 8 processes", emulated, eight, emulated.wall_s / eight.wall_s)


def measure_compile() -> None:
    """Measure the compile time of the slowest replica: one compiles, and the others wait for it."""
    runs: dict[str, list[float]] = {"one": [], "four": []}
    for _ in range(COMPILATIONS):
        runs["one"].append(sum(json.loads(used(do(compile_once), ONE_BRIDGED).output)))
        runs["four"].append(max(json.loads(used(do(compile_once), processes(REPLICAS)).output)))
    single, four = (min(runs[name]) for name in ("one", "four"))
    row("compile: 4 replicas / 1", f"{four:.2f} s", f"{single:.2f} s", four / single)


def measure_memory() -> None:
    """Measure how memory grows over the steps, and how many copies a transfer makes."""
    seen = json.loads(used(do(memory), ONE_BRIDGED).output)
    resident, buffers = zip(*seen, strict=True)
    most, least = max(resident), resident[0]
    case = f"memory: resident after {STEPS} steps / {SETTLED}"
    row(case, f"{most >> 20} MiB", f"{least >> 20} MiB", most / least)
    most, least = max(buffers), min(buffers)
    row("memory: live buffers, most / least", most, least, most / least)
    for way, extra in zip(("to", "from"), json.loads(used(do(round_trip), ONE_BRIDGED).output), strict=True):
        row(
            f"memory: extra copies of 1 GiB {way} device",
            f"{extra >> 20} MiB",
            "1024 MiB",
            extra / GIB,
        )


PARTS = {
    "step": measure_step,
    "plugin": measure_plugin,
    "scaling": measure_scaling,
    "collectives": measure_collectives,
    "agreement": measure_agreement,
    "spmd": measure_spmd,
    "start": measure_start,
    "compile": measure_compile,
    "memory": measure_memory,
    "jax": measure_jax,
}


if __name__ == "__main__":
    main(PARTS, globals())
