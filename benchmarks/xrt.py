"""Cost of a worker: cores behind a network service, compared with the same cores in the process itself.

    nox -s bench -- xrt [step] [start] [trips] [transfer] [memory] [encoding] [latency] [jobs] [resume]
                        [--json]

Contestants take turns in short rounds, so that other load on the machine affects all of them equally. A
ratio is ours to the peer's in the same round: the median over the rounds. The benchmark starts all workers
itself, on free ports.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import operator
import os
import queue
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import replicas
from harness import HOST, NATIVE, Contestant, contest, do, main, resident_bytes, row, used
from trainings import BATCH, XlaTraining, serve

CORES = 8
STARTS = 3
STEPS, WARM_UP = 50, 10
"""Steps that count waits: fewer than the maximum in flight, so that none waits for backpressure."""
TURNS = 4
READ_EVERY = 50
"""Number of steps between two reads of the loss, on the slow network."""
DISTANCE_S = 0.02
"""Latency of the slow network in one direction, in seconds."""
SIZE = 256 << 20
TRANSFERS = 5
LARGE = 1 << 30
ENCODED = 64 << 20
ENCODINGS = 10
EARLY, LATE = 20, 200
"""The jobs after which the worker's memory is compared."""
UP, DOWN = "/plain/Up", "/plain/Down"
"""Methods of the service that only streams."""
END_S = 30


# Workers, and the network between them and their clients.


@contextlib.contextmanager
def served(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Start a server, yield its address and process id, and end it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        try:
            document = "".join(itertools.takewhile(lambda line: line != "}\n", process.stdout))
            yield json.loads(document + "}")["address"], process.pid
        finally:
            process.terminate()
            process.wait(END_S)


def worker(cores: int, *more: str) -> contextlib.AbstractContextManager[tuple[str, int]]:
    """Start a worker, with more options."""
    options = ["--address", f"{HOST}:0", "--devices", str(cores), "--json", *more]
    return served([sys.executable, "-m", "polyxla", "worker", *options])


def node(address: str, cores: int) -> dict[str, str]:
    """Return the variables that select a worker."""
    config = f"tpu_worker;0;{address}"
    return {"XRT_TPU_CONFIG": config, "TPU_NUM_DEVICES": str(cores), "PJRT_DEVICE": ""}


def serving_process(supervisor: int) -> int:
    """Return the id of the serving process, a child of the worker's supervisor."""
    return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])


class Distance:
    """A proxy that forwards data with a delay and without a limit on the data in flight.

    Args:
        address: address to forward to.
        delay_s: delay in each direction, in seconds.
    """

    def __init__(self, address: str, delay_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._there = host, int(port)
        self._delay_s = delay_s
        self._listener = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def __enter__(self) -> str:
        return self.address

    def __exit__(self, *_: object) -> None:
        # shutdown wakes the accepting thread; close alone does not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, theirs = self._listener.accept()[0], socket.create_connection(self._there)
                for source, target in ((ours, theirs), (theirs, ours)):
                    target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    due: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                    self._start(self._receive, source, due)
                    self._start(self._send, due, target)

    def _receive(self, source: socket.socket, due: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"before the first"
        while data:
            try:
                data = source.recv(1 << 18)
            except OSError:
                data = b""
            due.put((time.monotonic() + self._delay_s, data))

    def _send(self, due: queue.SimpleQueue[tuple[float, bytes]], target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                at, data = due.get()
                time.sleep(max(0.0, at - time.monotonic()))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)


# The clients.


def reading(model: str, batch: int, port: int) -> None:
    serve(XlaTraining(model, batch, READ_EVERY), port)


def first_steps() -> None:
    """Print the time at which the last replica finished its first step, on the monotonic clock."""
    import polyxla

    print(max(polyxla.launch(_first_step)))


def _first_step(replica: Any) -> float:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    model = torch.nn.Linear(8, 8).to(torch_xla.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = model(torch.ones(4, 8).to(torch_xla.device())).sum()
    loss.backward()
    xm.optimizer_step(optimizer)
    torch_xla.sync()
    total: Any = xm.all_reduce(xm.REDUCE_SUM, loss.detach())
    total.item()
    return time.monotonic()


def trips() -> None:
    """Print the number of waits for the worker per step, without and with a read of the loss, as JSON."""
    found = []
    for read_every in (0, 1):
        training = XlaTraining("convnet", BATCH, read_every)
        training.run(WARM_UP)
        # Imported by torch_xla, not the other way round.
        import polyxla_xrt.node

        engine: Any = polyxla_xrt.node._own.engine  # noqa: SLF001  (only this counts)
        before = engine.session.waits
        for _ in range(TURNS):
            training.run(STEPS)
        found.append((engine.session.waits - before) / (TURNS * STEPS))
    print(json.dumps(found))


@contextlib.contextmanager
def engine_of(address: str) -> Iterator[Any]:
    """Yield an engine for one core of a worker, and end its job afterwards."""
    from polyxla_xrt.client.engine import RemoteEngine
    from polyxla_xrt.client.lease import Lease
    from polyxla_xrt.config.assignment import Assignment

    # The previous job may still be ending.
    lease = Lease(address, 1, os.environ, wait_s=END_S)
    assignment = Assignment(address, lease.job, (0,), "TPU", 0, 1, 0, 1)
    engine = RemoteEngine(assignment, os.environ, on_close=lease.close)
    try:
        yield engine
    finally:
        engine.close()


def transfers(ours: str, plain: str) -> None:
    """Print the seconds of each transfer, by name, as JSON; the transfers take turns."""
    import grpc
    import numpy as np

    from polyxla_bridge.programs.executable import ArrayType

    type_ = ArrayType("uint8", (SIZE,))
    data = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()
    with engine_of(ours) as engine, grpc.insecure_channel(plain) as channel:
        send, receive = channel.stream_unary(UP), channel.unary_stream(DOWN)
        (device,) = engine.devices

        def upload() -> Any:
            buffer = engine.from_host(device, type_, memoryview(data))
            # Requests are answered in order, so this returns when the upload has arrived.
            engine.memory_stats(device)
            return buffer

        uploaded = upload()
        # As torch does, but only once: the kernel takes longer to provide memory than this takes to fill it.
        memory = memoryview(bytearray(SIZE))

        def download() -> None:
            assert engine.to_host(uploaded, memory).result()[-1] == data[-1]

        def up() -> None:
            engine.delete(upload())

        ways: dict[str, Callable[[], Any]] = {
            "up": up,
            "down": download,
            "plain up": lambda: send(pieces(data)),
            "plain down": lambda: functools.reduce(operator.add, map(len, receive(b""))),
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _, (name, way) in itertools.product(range(TRANSFERS), ways.items()):
            started = time.perf_counter()
            way()
            took[name].append(time.perf_counter() - started)
    print(json.dumps(took))


def pieces(data: bytes) -> Iterator[bytes]:
    """Split bytes into chunks as the clients of a worker do."""
    from polyxla_xrt.protocol.channels import chunks

    return (bytes(piece) for piece, _ in chunks(memoryview(data)))


def serve_plainly() -> None:
    """Serve plain byte streams over gRPC until a signal."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    data = bytes(SIZE)

    def take(requests: Iterable[bytes], context: Any) -> bytes:
        return str(sum(map(len, requests))).encode()

    def give(request: bytes, context: Any) -> Iterator[bytes]:
        return pieces(data)

    calls = {
        UP: grpc.stream_unary_rpc_method_handler(take),
        DOWN: grpc.unary_stream_rpc_method_handler(give),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    service, names = UP.split("/")[1], {name.split("/")[2]: handler for name, handler in calls.items()}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, names)])
    port = server.add_insecure_port(f"{HOST}:0")
    server.start()
    print(json.dumps({"address": f"{HOST}:{port}"}, indent=2), flush=True)
    server.wait_for_termination()


def jobs(address: str, supervisor: int) -> None:
    """Print the resident bytes of the worker after an early and after a late job, as JSON."""
    import jax
    import numpy as np
    from jaxlib import xla_client

    lowered = jax.jit(lambda x: x * 2 + 1).lower(np.ones(1024, np.float32))
    computation: Any = lowered.compiler_ir("hlo")
    program = computation.as_serialized_hlo_module_proto()
    options = xla_client.CompileOptions().SerializeAsString()
    process, seen = serving_process(supervisor), []
    for number in range(1, LATE + 1):
        _do_job(address, program, options)
        if number in (EARLY, LATE):
            seen.append(resident_bytes(process))
    if process != serving_process(supervisor):
        raise SystemExit("the serving process was replaced during the benchmark")
    print(json.dumps(seen))


def _do_job(address: str, program: bytes, options: bytes) -> None:
    import numpy as np

    from polyxla_bridge.programs.executable import ArrayType

    with engine_of(address) as engine:
        (device,) = engine.devices
        executable = engine.compile(program, options)
        ones = np.ones(1024, np.float32).data.cast("B")
        argument = engine.from_host(device, ArrayType("float32", (1024,)), ones)
        (result,) = engine.execute(executable, device, [argument])
        assert np.frombuffer(engine.to_host(result).result(), np.float32)[0] == 3


# The measurements.


def measure_step() -> None:
    """Compare one core of a worker with torch_xla's client, and with the bridge in the process itself."""
    with (
        worker(1) as (address, _),
        contest(
            partial(Contestant, replicas.native, "convnet", BATCH, 1, node(address, 1)),
            partial(Contestant, replicas.native, "convnet", BATCH, 1, NATIVE),
            partial(Contestant, replicas.native, "convnet", BATCH, 1, replicas.ONE_BRIDGED),
        ) as (ours, native, bridged),
    ):
        row("step: 1 core / native", ours, native, ours.beside(native))
        row("step: 1 core / bridge", ours, bridged, ours.beside(bridged))


def measure_resume() -> None:
    """Compare a job that can go on after the loss of its worker with one that cannot."""
    row("resume: convnet / without", *_with_and_without("convnet"))
    row("resume: block / without", *_with_and_without("block"))


def _with_and_without(model: str) -> tuple[Contestant, Contestant, float]:
    # Each has a worker of its own, because one serves one job at a time.
    with (
        worker(1) as (first, _),
        worker(1) as (second, _),
        contest(
            partial(
                Contestant, replicas.native, model, BATCH, 1, node(first, 1) | {"POLYXLA_XRT_RESUME": "60"}
            ),
            partial(Contestant, replicas.native, model, BATCH, 1, node(second, 1)),
        ) as (ours, plain),
    ):
        return ours, plain, ours.beside(plain)


def measure_start() -> None:
    """Measure the time from the command to the end of the last replica's first step."""
    with worker(CORES) as (address, _):
        several, single = [], []
        for _ in range(STARTS):
            several.append(_seconds_to_step(address, CORES))
            single.append(_seconds_to_step(address, 1))
    row(
        f"start: {CORES} processes / 1",
        f"{statistics.median(several):.1f} s",
        f"{statistics.median(single):.1f} s",
        statistics.median(map(operator.truediv, several, single)),
    )


def _seconds_to_step(address: str, processes: int) -> float:
    run = ["-m", "polyxla", "run", "--devices", str(processes), *do(first_steps)[1:]]
    started = time.monotonic()
    return float(last_line([sys.executable, *run], node(address, CORES))) - started


def last_line(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run a command and return the last line that it prints."""
    return used(command, environ).output.splitlines()[-1]


def measure_trips() -> None:
    """Measure how often a step waits for an answer."""
    with worker(1) as (address, _):
        without, reading_all = json.loads(last_line(do(trips), node(address, 1)))
    row("trips: waits a step, loss not read", f"{without:.2f}", 0, without)
    row("trips: waits a step, loss read", f"{reading_all:.2f}", 1, reading_all)


def measure_transfer() -> None:
    """Compare transfers of a large array with plain streams of as many bytes."""
    with worker(1) as (address, _), served(do(serve_plainly)) as (plain, _):
        took = json.loads(last_line(do(transfers, address, plain), {}))
    for way, name in (("up", "upload"), ("down", "download")):
        ours, peer = took[way], took[f"plain {way}"]
        ratio = statistics.median(map(operator.truediv, peer, ours))
        row(f"transfer: {name} / gRPC", _speed(ours), _speed(peer), ratio)


def measure_memory() -> None:
    """Measure the peak of a worker's whole memory, from its start, when a client uploads an array."""
    with worker(1) as (address, supervisor):
        peak = int(last_line(do(one_upload, address, supervisor), {}))
    case = "memory: peak of a worker / upload"
    row(case, f"{peak >> 20} MiB", f"{LARGE >> 20} MiB", peak / LARGE)


def one_upload(address: str, supervisor: int) -> None:
    """Upload an array, and print the peak of the worker's resident bytes."""
    from polyxla_bridge.programs.executable import ArrayType

    with engine_of(address) as engine:
        (device,) = engine.devices
        held = engine.from_host(device, ArrayType("uint8", (LARGE,)), memoryview(bytes(LARGE)))
        # Requests are answered in order, so this returns when the upload has arrived.
        engine.memory_stats(device)
        status = Path(f"/proc/{serving_process(supervisor)}/status").read_text()
        print(int(status.split("VmHWM:")[1].split()[0]) << 10)
        engine.delete(held)


def _speed(took: Sequence[float], size: int = SIZE) -> str:
    return f"{size / statistics.median(took) / (1 << 20):,.0f} MiB/s"


def measure_encoding() -> None:
    """Encoding an upload by `bulk_encoding`, against protobuf's own serialization of the same message."""
    ours, peer = json.loads(last_line(do(encodings), {}))
    ratio = statistics.median(map(operator.truediv, peer, ours))
    row("encoding: upload / protobuf", _speed(ours, ENCODED), _speed(peer, ENCODED), ratio)


def encodings() -> None:
    """Print the seconds that each encoding of an array took, in turns: ours, then protobuf's, as JSON."""
    from polyxla_xrt.proto import worker_pb2 as pb
    from polyxla_xrt.protocol import bulk_encoding

    chunks = [os.urandom(1 << 20)] * (ENCODED >> 20)

    def ours(chunk: bytes) -> bytes:
        return bulk_encoding.encode([bulk_encoding.upload(pb.Upload(array=1), chunk)])

    def protobuf(chunk: bytes) -> bytes:
        commands = pb.Commands()
        upload = commands.commands.add().upload
        upload.array = 1
        upload.data = chunk
        return commands.SerializeToString()

    assert ours(chunks[0]) == protobuf(chunks[0])
    took: list[list[float]] = [[], []]
    for _, (encode, seconds) in itertools.product(range(ENCODINGS), zip((ours, protobuf), took, strict=True)):
        started = time.perf_counter()
        for chunk in chunks:
            encode(chunk)
        seconds.append(time.perf_counter() - started)
    print(json.dumps(took))


def measure_latency() -> None:
    """Compare a worker behind a slow network with one behind a fast network, both through a proxy."""
    with contextlib.ExitStack() as stack:
        # A client finds the token that a worker makes for itself by the worker's address, not by a proxy's.
        token = stack.enter_context(tempfile.NamedTemporaryFile("w"))
        print(secrets.token_hex(32), file=token, flush=True)
        named = {"POLYXLA_XRT_TOKEN_FILE": token.name}
        contestants = []
        for delay_s in (DISTANCE_S, 0.0):
            address, _ = stack.enter_context(worker(1, "--token-file", token.name))
            through = node(stack.enter_context(Distance(address, delay_s)), 1)
            contestants.append(partial(SteadyContestant, reading, "convnet", BATCH, 1, through | named))
        ours, peer = stack.enter_context(contest(*contestants))
        case = f"latency: {DISTANCE_S * 1000:.0f} ms one way / 0"
        row(case, ours, peer, ours.beside(peer))


class SteadyContestant(Contestant):
    """A contestant whose rounds contain several reads of the loss."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps = 4 * READ_EVERY


def measure_jobs() -> None:
    """Measure how a worker's memory grows over the jobs."""
    with worker(1) as (address, supervisor):
        early, late = json.loads(last_line(do(jobs, address, supervisor), {}))
    case = f"jobs: resident after {LATE} / {EARLY}"
    row(case, f"{late >> 20} MiB", f"{early >> 20} MiB", late / early)


PARTS = {
    "step": measure_step,
    "start": measure_start,
    "trips": measure_trips,
    "transfer": measure_transfer,
    "memory": measure_memory,
    "encoding": measure_encoding,
    "latency": measure_latency,
    "jobs": measure_jobs,
    "resume": measure_resume,
}


if __name__ == "__main__":
    main(PARTS, globals())
