"""A job goes on after the loss of its worker or its connection, with the same bits."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla import UsageError
from polyxla.plugin import snapshot
from polyxla_bridge.engine.engine import Buffer
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_testing.processes import wait_until
from polyxla_xrt import env
from polyxla_xrt.client.engine import RemoteEngine
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.client.session import MAX_FRUITLESS
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.config.configuration import read_configuration
from polyxla_xrt.config.resuming import Resuming, read_resuming, refuse_resuming
from polyxla_xrt.errors import WorkerLostError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_decoding, bulk_encoding
from polyxla_xrt.protocol.worker import SERVICE

WAIT_S, EVERY, SIZE = 60, 10, 1000
VECTOR = ArrayType("float32", (SIZE,))
ALONE = """HloModule step, input_output_alias={ {}: (0, {}, may-alias) }
ENTRY main {
  w = f32[1000] parameter(0)
  x = f32[1000] parameter(1)
  p = f32[1000] multiply(w, x)
  s = f32[1000] sine(p)
  ROOT n = f32[1000] add(w, s)
}"""
TOGETHER = """HloModule meet, replica_count=2, input_output_alias={ {}: (0, {}, may-alias) }
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
ENTRY main {
  w = f32[1000] parameter(0)
  x = f32[1000] parameter(1)
  p = f32[1000] multiply(w, x)
  s = f32[1000] sine(p)
  r = f32[1000] all-reduce(s), replica_groups={}, to_apply=add
  ROOT n = f32[1000] add(w, r)
}"""


def variables(**more: str) -> dict[str, str]:
    given = {env.POLYXLA_XRT_RESUME: str(WAIT_S), env.POLYXLA_XRT_SNAPSHOT_EVERY: str(EVERY)}
    return snapshot() | given | more


def lease_of(address: str, cores: int, environ: dict[str, str], said: list[str] | None = None) -> Lease:
    resuming = read_resuming(environ)
    tell = (said if said is not None else []).append
    return Lease(address, cores, environ, wait_s=WAIT_S, resuming=resuming, on_wait=tell)


def assignment(lease: Lease, address: str, ordinal: int = 0, world: int = 1) -> Assignment:
    return Assignment(address, lease.job, (ordinal,), "TPU", ordinal, world, ordinal, world)


def compiled(engine: RemoteEngine, text: str) -> Executable:
    options = xla_client.CompileOptions()
    options.num_replicas = len(engine.devices)
    module = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return engine.compile(module, options.SerializeAsString())


def values(number: float) -> memoryview:
    return memoryview(struct.pack(f"<{SIZE}f", *[number + place for place in range(SIZE)]))


class Training:
    """Steps of one replica. Each donates its weights, uploads a batch, and every third is read later."""

    def __init__(self, engine: RemoteEngine, ordinal: int = 0) -> None:
        self.engine = engine
        self.ordinal = ordinal
        self.device = engine.devices[ordinal]
        self.program = compiled(engine, TOGETHER if len(engine.devices) > 1 else ALONE)
        self.weights: Buffer = engine.from_host(self.device, VECTOR, values(1))
        self.read: list[Future[memoryview]] = []
        self.steps = 0

    def step(self) -> None:
        batch = self.engine.from_host(self.device, VECTOR, values(self.steps + self.ordinal / 8))
        (self.weights,) = self.engine.execute(self.program, self.device, [self.weights, batch])
        self.engine.delete(batch)
        if self.steps % 3 == 0:
            self.read.append(self.engine.to_host(self.weights))
        self.steps += 1

    def results(self) -> list[bytes]:
        return [bytes(each.result(WAIT_S)) for each in (*self.read, self.engine.to_host(self.weights))]


def train(engine: RemoteEngine, steps: int, before: Callable[[int], None] = lambda _: None) -> list[bytes]:
    training = Training(engine)
    for number in range(steps):
        before(number)
        training.step()
    return training.results()


@pytest.fixture
def connect() -> Iterator[Callable[..., RemoteEngine]]:
    """Return a function that leases a core of a worker, and returns its engine."""
    with ExitStack() as stack:

        def connect(address: str, said: list[str] | None = None, **more: str) -> RemoteEngine:
            environ = variables(**more)
            lease = stack.enter_context(closing(lease_of(address, 1, environ, said)))
            return stack.enter_context(closing(RemoteEngine(assignment(lease, address), environ)))

        yield connect


def kill(worker: Any) -> None:
    """Kill the serving process, as soon as there is one."""
    assert worker.status()
    os.kill(worker.serving_pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("places", [(0,), (5,), (9, 40), (10,), (11, 12)], ids=str)
def test_a_killed_worker_changes_no_bit(
    start_worker: Callable[..., Any], connect: Callable[..., RemoteEngine], places: tuple[int, ...]
) -> None:
    worker = start_worker("--devices", "1")
    said: list[str] = []
    engine = connect(worker.address, said)
    whole = train(engine, 50)

    def kill_at(number: int) -> None:
        if number in places:
            kill(worker)

    assert train(engine, 50, kill_at) == whole
    # A second loss before the job has its cores again is not told.
    assert 1 <= len(said) <= len(places)
    assert all(f"{worker.address} is gone: " in text and "waiting up to 60 s for" in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [10, pytest.param(50, marks=pytest.mark.long)])
def test_sessions_that_are_cut_leave_nothing(
    worker: Any, connect: Callable[..., RemoteEngine], capfd: pytest.CaptureFixture[str], cuts: int
) -> None:
    engine = connect(worker.address)
    whole = train(engine, cuts + 1)
    training, threads = Training(engine), 0
    for number in range(cuts):
        training.step()
        engine.session._call.cancel()
        # The read waits for the next session.
        assert engine.to_host(training.weights).result(WAIT_S)
        threads = threads or threading.active_count() if number > 3 else 0
    training.step()
    assert training.results() == whole
    assert threading.active_count() <= threads + 2
    assert capfd.readouterr().err.count("resumed on the worker at") == cuts
    # The weights of both trainings, and nothing of the lost sessions.
    assert worker.status()["jobs"][0]["memory_bytes"] <= 2 * 4 * SIZE


def test_replicas_go_on_from_one_place(start_worker: Callable[..., Any]) -> None:
    worker = start_worker()
    environ = variables()

    def run(ordinal: int, lease: Lease, killer: Callable[[int], None]) -> list[bytes]:
        with closing(RemoteEngine(assignment(lease, worker.address, ordinal, 2), environ)) as engine:
            training = Training(engine, ordinal)
            for number in range(60):
                if ordinal == 0:
                    killer(number)
                training.step()
            return training.results()

    def both(killer: Callable[[int], None]) -> list[list[bytes]]:
        with closing(lease_of(worker.address, 2, environ)) as lease, ThreadPoolExecutor(2) as threads:
            return [*threads.map(lambda ordinal: run(ordinal, lease, killer), range(2))]

    def kill_twice(number: int) -> None:
        if number in (24, 47):
            kill(worker)

    whole = both(lambda _: None)
    worker.wait_until_free()
    assert both(kill_twice) == whole
    assert whole[0] == whole[1]


def test_a_replica_that_has_an_array_that_failed_goes_on_with_the_others(
    start_worker: Callable[..., Any],
) -> None:
    worker = start_worker("--memory-per-job", "0.01")
    environ, large = variables(), ArrayType("uint8", (1 << 24,))

    def run(ordinal: int, lease: Lease, loss: int | None) -> list[bytes]:
        with closing(RemoteEngine(assignment(lease, worker.address, ordinal, 2), environ)) as engine:
            training = Training(engine, ordinal)
            if ordinal == 0:
                too_large = engine.from_host(training.device, large, memoryview(bytes(1 << 24)))
                failed = engine.copy(too_large, training.device)
                engine.delete(too_large)
            for number in range(40):
                if ordinal == 0 and number == loss:
                    kill(worker)
                training.step()
            results = training.results()
            if ordinal == 0:
                with pytest.raises(PjrtError):
                    engine.to_host(failed).result(WAIT_S)
            return results

    def both(loss: int | None) -> list[list[bytes]]:
        with closing(lease_of(worker.address, 2, environ)) as lease, ThreadPoolExecutor(2) as threads:
            return [*threads.map(lambda ordinal: run(ordinal, lease, loss), range(2))]

    whole = both(None)
    worker.wait_until_free()
    assert both(35) == whole


@pytest.mark.slow
def test_partitioned_programs_and_copies_go_on(start_worker: Callable[..., Any]) -> None:
    worker = start_worker()
    environ = variables()
    text = """HloModule parts
        ENTRY main { w = f32[2000] parameter(0), sharding={devices=[2]0,1}
          s = f32[2000] sine(w), sharding={devices=[2]0,1}
          r = f32[2000] reverse(s), dimensions={0}, sharding={devices=[2]0,1}
          ROOT n = f32[2000] add(w, r), sharding={devices=[2]0,1} }"""
    options = xla_client.CompileOptions()
    options.num_partitions = 2
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.num_partitions = 2

    def run(engine: RemoteEngine, losses: Sequence[int]) -> list[bytes]:
        module = hlo_module_from_text(text).as_serialized_hlo_module_proto()
        parts = engine.compile(module, options.SerializeAsString())
        rows = [[engine.from_host(device, VECTOR, values(device.index))] for device in engine.devices]
        copies = []
        for number in range(3 * EVERY):
            if number in losses:
                kill(worker)
            rows = engine.execute_partitioned(parts, rows)
            # The copies live on the other core, and some are in no snapshot before they are read.
            copies.append(engine.copy(rows[0][0], engine.devices[1]))
        read = [engine.to_host(array) for array in (*copies, rows[0][0], rows[1][0])]
        return [bytes(each.result(WAIT_S)) for each in read]

    with closing(lease_of(worker.address, 2, environ)) as lease:
        whole_job = Assignment(worker.address, lease.job, (0, 1), "TPU", 0, 2, 0, 1)
        with closing(RemoteEngine(whole_job, environ)) as engine:
            assert run(engine, (4, 17)) == run(engine, ())


@pytest.mark.slow
def test_a_spare_worker_takes_the_job(
    start_worker: Callable[..., Any], connect: Callable[..., RemoteEngine]
) -> None:
    first, second = start_worker("--devices", "1"), start_worker("--devices", "1")
    said: list[str] = []
    engine = connect(first.address, said, **{env.POLYXLA_XRT_SPARES: second.address})
    whole = train(engine, 30)

    def kill_first(number: int) -> None:
        if number == 17:
            serving = first.serving_pid
            first.process.kill()
            os.kill(serving, signal.SIGKILL)

    assert train(engine, 30, kill_first) == whole
    assert f"for {first.address} or {second.address}" in said[0]
    assert second.status()["jobs"][0]["pid"] == os.getpid()


def test_a_worker_that_stays_away_ends_the_job(
    start_worker: Callable[..., Any], connect: Callable[..., RemoteEngine]
) -> None:
    worker = start_worker("--devices", "1")
    engine = connect(worker.address, **{env.POLYXLA_XRT_RESUME: "1"})
    train(engine, 1)
    worker.process.kill()
    started = time.monotonic()
    gone = "is gone: .*; no worker has taken the job again within 1 s: there is no worker at"
    with pytest.raises(PjrtError, match=gone):
        train(engine, 1000)
    assert time.monotonic() - started < 20


def test_a_job_goes_on_once_its_token_can_be_read_again(
    start_worker: Callable[..., Any],
    connect: Callable[..., RemoteEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "polyxla.xrt")
    own, token, away = tmp_path / "worker", tmp_path / "token", tmp_path / "away"
    own.write_text("t" * 32)
    token.write_text("t" * 32)
    worker = start_worker("--devices", "1", "--token-file", str(own))
    engine = connect(worker.address, **{env.POLYXLA_XRT_TOKEN_FILE: str(token)})
    training = Training(engine)
    training.step()
    token.rename(away)
    os.kill(worker.serving_pid, signal.SIGKILL)
    wait_until(lambda: f"{token} cannot be read" in caplog.text, "an attempt without the token", WAIT_S)
    away.rename(token)
    training.step()
    assert training.results() == train(engine, 2)


def test_a_job_whose_token_is_gone_ends(
    start_worker: Callable[..., Any], connect: Callable[..., RemoteEngine], tmp_path: Path
) -> None:
    worker = start_worker("--devices", "1")
    (token := tmp_path / "token").write_text("t" * 32)
    engine = connect(worker.address, **{env.POLYXLA_XRT_TOKEN_FILE: str(token), env.POLYXLA_XRT_RESUME: "1"})
    token.unlink()
    worker.process.kill()
    gone = f"no worker has taken the job again within 1 s: {token} cannot be read"
    with pytest.raises(PjrtError, match=gone):
        train(engine, 1000)


def test_an_answer_that_breaks_the_session_ends_the_job() -> None:
    def session(requests: Iterator[Any], _: Any) -> Iterator[bytes]:
        next(requests)
        # A worker attaches a process once.
        yield bulk_encoding.encode([pb.Answer(attached=pb.Attached())] * 2)
        yield from (b"" for _ in requests if False)

    with (
        served(session) as own,
        closing(RemoteEngine(own, variables())) as engine,
        pytest.raises(PjrtError, match=f"the session with the worker at {own.address} failed: Invalid"),
    ):
        train(engine, 1)


@pytest.mark.slow
def test_a_replica_that_has_ended_cannot_come_back(
    start_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_worker()
    environ = variables(**{env.POLYXLA_XRT_RESUME: "3"})
    with closing(lease_of(worker.address, 2, environ)) as lease:
        engines = [
            RemoteEngine(assignment(lease, worker.address, ordinal, 2), environ) for ordinal in range(2)
        ]
        with closing(engines[1]):
            with closing(engines[0]):
                trainings = [Training(engine, ordinal) for ordinal, engine in enumerate(engines)]
                for _ in range(EVERY + 1):
                    for training in trainings:
                        training.step()
                for training in trainings:
                    training.results()
            kill(worker)
            with pytest.raises(PjrtError, match="no worker has taken the job again within 3 s"):
                engines[1].to_host(trainings[1].weights).result(WAIT_S)


@contextmanager
def served(session: Callable[[Iterator[Any], Any], Iterator[bytes]]) -> Iterator[Assignment]:
    """Serve sessions; yield an assignment to one."""
    server = grpc.server(ThreadPoolExecutor(2))
    handler = grpc.stream_stream_rpc_method_handler(session, bulk_decoding.commands)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Session": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield Assignment(f"127.0.0.1:{port}", "0" * 32, (0,), "TPU", 0, 1, 0, 1)
    finally:
        server.stop(0)


def test_a_program_that_ends_each_worker_is_not_sent_forever() -> None:
    sessions = 0

    def session(requests: Iterator[Any], _: Any) -> Iterator[bytes]:
        nonlocal sessions
        sessions += 1
        next(requests)
        yield bulk_encoding.encode([pb.Answer(attached=pb.Attached())])
        # As a worker whose process crashes: it has read a command, and nothing more comes.
        next(requests)

    with served(session) as own, closing(RemoteEngine(own, variables())) as engine:
        written = engine.from_host(engine.devices[0], VECTOR, values(0))
        with pytest.raises(PjrtError, match=f"that was the {MAX_FRUITLESS}th time at the same place"):
            engine.to_host(written).result(WAIT_S)
    assert sessions == MAX_FRUITLESS


def test_a_worker_that_begins_no_session_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyxla_xrt.client.session.ATTACH_S", 0.5)

    def session(requests: Iterator[Any], _: Any) -> Iterator[bytes]:
        # It reads what comes until the client leaves, and answers nothing.
        yield from (b"" for _ in requests if False)

    with (
        served(session) as own,
        pytest.raises(WorkerLostError, match=r"has not begun a session within 0\.5 s"),
    ):
        RemoteEngine(own, snapshot())


def test_a_program_that_changes_its_results_is_refused(
    worker: Any, connect: Callable[..., RemoteEngine]
) -> None:
    text = """HloModule noise
        ENTRY main { a = f32[] constant(0) b = f32[] constant(1)
          ROOT r = f32[4] rng(a, b), distribution=rng_uniform }"""
    refused = "noise has rng, whose results depend on what the worker did before: .* from a seed, or unset"
    with pytest.raises(PjrtError, match=refused):
        compiled(connect(worker.address), text)


def test_a_key_that_is_none_is_refused(worker: Any) -> None:
    channel = grpc.insecure_channel(worker.address)
    from polyxla_xrt.proto import worker_pb2_grpc
    from polyxla_xrt.protocol.worker import PROTOCOL

    stub: Any = worker_pb2_grpc.WorkerStub(channel)
    with closing(channel), pytest.raises(grpc.RpcError) as refused:
        next(stub.Lease(pb.LeaseRequest(protocol=PROTOCOL, cores=1, job="guess")))
    assert refused.value.details() == "a job's key must be 32 hexadecimal digits"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({env.POLYXLA_XRT_RESUME: "soon"}, "'soon' is not a number of seconds"),
        ({env.POLYXLA_XRT_SNAPSHOT_EVERY: "0"}, "'0' is not an integer of at least 1"),
        ({env.POLYXLA_XRT_SPARES: "10.0.0.2"}, "there is no port after '10.0.0.2'"),
    ],
    ids=["wait", "every", "spares"],
)
def test_a_wrong_variable_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        read_resuming(given)
    (name,) = given
    assert name in str(refused.value)


def test_variables_are_read() -> None:
    given = {env.POLYXLA_XRT_RESUME: "90", env.POLYXLA_XRT_SPARES: "a:1, [::1]:8470"}
    assert read_resuming(given) == Resuming(90, 100, ("a:1", "[::1]:8470"))
    assert read_resuming({env.POLYXLA_XRT_SPARES: "a:1"}) is None


def test_a_job_of_several_workers_is_refused_before_it_starts() -> None:
    given = {
        env.XRT_TPU_CONFIG: "w;0;a:1|w;1;b:1",
        env.XRT_MESH_SERVICE_ADDRESS: "a:2",
        env.POLYXLA_XRT_RESUME: "60",
    }
    configuration = read_configuration(given)
    assert configuration
    with pytest.raises(UsageError, match=r"a job on 2 workers cannot go on after the loss of one"):
        refuse_resuming(configuration, given)
