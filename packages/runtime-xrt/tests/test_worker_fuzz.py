"""A worker gets over 20,000 malformed or meaningless requests, none of which may harm it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import grpc
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla.plugin import snapshot
from polyxla_bridge.abi import DTYPES, width
from polyxla_xrt import env
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.proto import worker_pb2_grpc
from polyxla_xrt.protocol.worker import PROTOCOL, array_bytes

REQUESTS = 20_000
CALLS = 3_000
SESSIONS = 60
COMMANDS = 300
"""In each session, before the command that ends it."""
DEADLINE_S = 60.0
GROWTH = 1.03
"""Largest growth of the worker's memory in the second half."""
MALFORMED = 1500
LEAK_BYTES = 2000
"""Largest growth of the worker's memory for each malformed call. In grpcio's own way, it is 19,000."""
OPTIONS = xla_client.CompileOptions().SerializeAsString()
PROGRAM: bytes = hlo_module_from_text(
    "HloModule tiny ENTRY main { x = f32[2] parameter(0) ROOT y = f32[2] add(x, x) }"
).as_serialized_hlo_module_proto()
ARRAY, RESULTS, REQUEST = 1 << 20, 1 << 30, 1 << 40
"""Where a session's numbers begin; smaller numbers name nothing."""
UNKNOWN = (0, 1, 77, 2**31, 2**63, 2**64 - 1)
SERVICE = "/polyxla.xrt.worker.Worker/"


class Storm:
    """A session's commands: all follow the protocol, few make sense.

    Args:
        chance: the source of randomness.

    Attributes:
        asked: requests that must be answered.
        ran: executions that must be answered.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.asked: set[int] = set()
        self.ran: set[int] = set()
        self._arrays: list[int] = []
        self._programs: list[int] = []
        self._next = 0
        self._commands = [self._upload, self._execute, self._release, self._download, self._copy]

    def commands(self, count: int) -> list[pb.Command]:
        made = [self._compile(PROGRAM)]
        while len(made) < count:
            # Rare, because the compiler is slow to refuse a program.
            rare = self.chance.random()
            if rare < 0.02:
                made.append(self._compile(self._garbage()))
            elif rare < 0.06:
                made.append(pb.Command(stats=pb.Stats(request=self._request())))
            else:
                made += self.chance.choice(self._commands)()
        return made

    def _number(self, base: int) -> int:
        self._next += 1
        return base + self._next * 8

    def _request(self) -> int:
        number = self._number(REQUEST)
        self.asked.add(number)
        return number

    def _some(self, numbers: list[int]) -> int:
        known = numbers and self.chance.random() < 0.7
        return self.chance.choice(numbers if known else UNKNOWN)

    def _garbage(self) -> bytes:
        if self.chance.random() < 0.5:
            return self.chance.randbytes(self.chance.randrange(200))
        return PROGRAM[: self.chance.randrange(len(PROGRAM))]

    def _compile(self, hlo: bytes) -> pb.Command:
        number = self._request()
        self._programs.append(number)
        return pb.Command(compile=pb.Compile(request=number, options=OPTIONS, hlo=hlo, ends=True))

    def _upload(self) -> list[pb.Command]:
        dtype = self.chance.choice([name for name in DTYPES if width(name)])
        dims = [self.chance.randrange(5) for _ in range(self.chance.randrange(4))]
        if self.chance.random() < 0.5:
            dtype, dims = "float32", [2]
        number = self._number(ARRAY)
        self._arrays.append(number)
        data = self.chance.randbytes(array_bytes(width(dtype), tuple(dims)))
        middle = self.chance.randrange(len(data) + 1)
        type_ = pb.ArrayType(dtype=dtype, dims=dims)
        return [
            pb.Command(upload=pb.Upload(array=number, type=type_, data=data[:middle])),
            pb.Command(upload=pb.Upload(array=number, data=data[middle:], ends=True)),
        ]

    def _execute(self) -> list[pb.Command]:
        sequence = len(self.ran) + 1
        self.ran.add(sequence)
        first = self._number(RESULTS)
        self._arrays.append(first)
        count = 1 if self.chance.random() < 0.6 else self.chance.randrange(40)
        request = pb.Execute(
            sequence=sequence, program=self._some(self._programs), cores=[0], first_result=first
        )
        request.arguments.extend(self._some(self._arrays) for _ in range(count))
        request.keep.extend(self.chance.choice((0, 7, 2**32 - 1)) for _ in range(self.chance.randrange(3)))
        return [pb.Command(execute=request)]

    def _release(self) -> list[pb.Command]:
        arrays = [self._some(self._arrays) for _ in range(self.chance.randrange(6))]
        return [pb.Command(release=pb.Release(arrays=arrays, programs=[self.chance.choice(UNKNOWN)]))]

    def _download(self) -> list[pb.Command]:
        request = pb.Download(request=self._request(), array=self._some(self._arrays))
        return [pb.Command(download=request)]

    def _copy(self) -> list[pb.Command]:
        number = self._number(ARRAY)
        source = self._some(self._arrays)
        self._arrays.append(number)
        return [pb.Command(copy=pb.Copy(array=number, source=source))]


def misuses(chance: random.Random) -> Iterator[list[bytes]]:
    """Yield messages that are invalid in a session, without end."""
    byte = pb.ArrayType(dtype="uint8", dims=[4])
    attach = pb.Attach(protocol=PROTOCOL, job="0" * 32, cores=[0])
    wrong: list[list[pb.Command]] = [
        [pb.Command()],
        [pb.Command(attach=attach)],
        [pb.Command(upload=pb.Upload(array=5, type=byte, data=bytes(5)))],
        [pb.Command(upload=pb.Upload(array=5, type=byte, data=bytes(3), ends=True))],
        [pb.Command(upload=pb.Upload(array=5, type=byte)), pb.Command(upload=pb.Upload(array=6))],
        [pb.Command(upload=pb.Upload(array=5, type=byte)), pb.Command(stats=pb.Stats())],
        [pb.Command(upload=pb.Upload(array=5))],
        [pb.Command(upload=pb.Upload(array=5, type=pb.ArrayType(dtype="x" * 300_000)))],
        [pb.Command(upload=pb.Upload(type=pb.ArrayType(dtype="uint8", dims=[2**62] * 400_000)))],
        [pb.Command(upload=pb.Upload(type=pb.ArrayType(dtype="uint8", dims=[2**62] * 60)))],
        [pb.Command(upload=pb.Upload(type=pb.ArrayType(dtype="uint8", dims=[-1])))],
        [pb.Command(execute=pb.Execute(cores=[7]))],
        [pb.Command(execute=pb.Execute())],
        [pb.Command(execute=pb.Execute(cores=[0] * 3, arguments=[5] * 4))],
        [pb.Command(stats=pb.Stats(core=2**32 - 1))],
        [pb.Command(copy=pb.Copy(core=1))],
        [pb.Command(compile=pb.Compile(request=5)), pb.Command(compile=pb.Compile(request=6))],
    ]
    while True:
        for commands in wrong:
            yield [pb.Commands(commands=commands).SerializeToString()]
        yield [bytes(5 << 20)]
        yield [b"\x07" + chance.randbytes(100)]
        yield [pb.Commands(commands=wrong[1]).SerializeToString()[:-1]]


def storm(address: str, chance: random.Random, last: list[bytes]) -> int:
    """Send commands, check that all are answered, then send `last`; return how many were sent."""
    made = Storm(chance)
    answered, commands = threading.Event(), made.commands(COMMANDS)

    def messages(job: str) -> Iterator[bytes]:
        attach = pb.Attach(protocol=PROTOCOL, job=job, cores=[0], ordinal=7)
        yield pb.Commands(commands=[pb.Command(attach=attach)]).SerializeToString()
        for start in range(0, len(commands), 20):
            yield pb.Commands(commands=commands[start : start + 20]).SerializeToString()
        assert answered.wait(DEADLINE_S)
        yield from last

    with closing(Lease(address, 1, snapshot(), wait_s=DEADLINE_S)) as lease, channel_to(address) as channel:
        call = channel.stream_stream(f"{SERVICE}Session")(messages(lease.job), timeout=DEADLINE_S)
        code = None
        try:
            for answers in map(pb.Answers.FromString, call):
                for answer in answers.answers:
                    made.ran.discard(answer.executed.sequence)
                    if answer.part.ends:
                        made.asked.discard(answer.part.request)
                if not made.asked and not made.ran:
                    answered.set()
        except grpc.RpcError as error:
            code = error.code()
        assert answered.is_set(), (code, made.asked, made.ran)
        assert code is not grpc.StatusCode.DEADLINE_EXCEEDED
    return len(commands) + len(last) + 1


def channel_to(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=[("grpc.max_send_message_length", 1 << 30)])


def calls(channel: grpc.Channel) -> dict[str, Callable[[bytes], Any]]:
    """Return functions that send raw bytes to a method and wait for all answers."""

    def unary(name: str) -> Callable[[bytes], Any]:
        return lambda data: channel.unary_unary(name)(data, timeout=DEADLINE_S)

    def stream(name: str) -> Callable[[bytes], Any]:
        return lambda data: list(channel.unary_stream(name)(data, timeout=DEADLINE_S))

    def both(name: str) -> Callable[[bytes], Any]:
        return lambda data: list(channel.stream_stream(name)(iter([data]), timeout=DEADLINE_S))

    return {
        "Status": unary(f"{SERVICE}Status"),
        "Lease": stream(f"{SERVICE}Lease"),
        "Session": both(f"{SERVICE}Session"),
        "Keep": lambda data: channel.stream_unary(f"{SERVICE}Keep")(iter([data, data]), timeout=DEADLINE_S),
        "Recall": stream(f"{SERVICE}Recall"),
        "Nothing": unary(f"{SERVICE}Nothing"),
        "Check": unary("/grpc.health.v1.Health/Check"),
    }


def bombard(address: str, chance: random.Random, count: int) -> int:
    """Call every method with invalid messages while the cores are held; return the number of calls."""
    attach = pb.Attach(protocol=PROTOCOL, job="0" * 32, cores=[0, 1], ordinal=3)
    asked = pb.LeaseRequest(
        protocol=PROTOCOL, holder=pb.Holder(host="h", user="u", command="c" * 99), cores=1, job="1" * 32
    )
    environ = snapshot() | {env.POLYXLA_XRT_JOB: "fuzzed"}
    with closing(Lease(address, 1, environ, wait_s=DEADLINE_S)) as lease, channel_to(address) as channel:
        drain = channel.unary_unary(f"{SERVICE}Drain")
        methods = calls(channel)
        valid = {
            "Status": b"",
            "Lease": asked.SerializeToString(),
            "Session": pb.Commands(commands=[pb.Command(attach=attach)]).SerializeToString(),
            "Keep": pb.KeepRequest(
                protocol=PROTOCOL, job=lease.job, name="n", size=6, data=b"abc"
            ).SerializeToString(),
            "Recall": pb.RecallRequest(protocol=PROTOCOL, job=lease.job, name="n").SerializeToString(),
            "Nothing": b"x",
            "Check": b"\n\x05other",
        }
        # Both messages are valid, before any that are not.
        methods["Keep"](valid["Keep"])
        assert b"".join(methods["Recall"](valid["Recall"])) == b"\n\x06abcabc"
        for _ in range(count):
            name = chance.choice(list(methods))
            send(methods[name], changed(valid[name], chance))
            # Its message is empty, so any bytes that parse are valid: only unparsable bytes are sent.
            send(lambda data: drain(data, timeout=DEADLINE_S), b"\x07" + chance.randbytes(20))
    return 2 * count


def changed(data: bytes, chance: random.Random) -> bytes:
    how = chance.random()
    if how < 0.01:
        return chance.randbytes(5 << 20)
    if how < 0.4:
        return chance.randbytes(chance.randrange(300))
    if how < 0.6 or not data:
        return data[: chance.randrange(len(data) + 1)]
    mixed = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        mixed[chance.randrange(len(mixed))] = chance.randrange(256)
    return bytes(mixed)


def send(call: Callable[[bytes], Any], data: bytes) -> None:
    code = None
    try:
        call(data)
    except grpc.RpcError as error:
        code = error.code()
    assert code not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE), data


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_malformed_requests_do_not_harm_the_worker(start_worker: Callable[..., Any]) -> None:
    worker = start_worker("--keep", "60")
    serving, chance, sent = worker.serving_pid, random.Random(8470), 0
    wrong = misuses(chance)
    resident: list[int] = []
    for _ in range(4):
        sent += bombard(worker.address, chance, CALLS // 8)
        for _ in range(SESSIONS // 4):
            sent += storm(worker.address, chance, next(wrong))
        worker.wait_until_free()
        resident.append(worker.resident_bytes)
    assert sent >= REQUESTS
    assert worker.serving_pid == serving, worker.log
    assert resident[3] < GROWTH * resident[1], resident
    assert "Traceback" not in worker.log
    assert_serves(worker.address)


@pytest.mark.slow
def test_a_request_that_cannot_be_parsed_leaves_no_memory(start_worker: Callable[..., Any]) -> None:
    worker = start_worker()

    def call(count: int) -> int:
        with channel_to(worker.address) as channel:
            methods = [calls(channel)[name] for name in ("Status", "Lease", "Check")]
            for number in range(count):
                with pytest.raises(grpc.RpcError) as caught:
                    methods[number % 3](b"\x07")
                assert caught.value.code() is grpc.StatusCode.INTERNAL
        resident: int = worker.resident_bytes
        return resident

    before = call(300)
    assert call(MALFORMED) - before < MALFORMED * LEAK_BYTES


def assert_serves(address: str) -> None:
    upload = pb.Upload(array=1, type=pb.ArrayType(dtype="float32", dims=[2]), data=bytes(8), ends=True)
    commands = [
        pb.Command(compile=pb.Compile(request=2, options=OPTIONS, hlo=PROGRAM, ends=True)),
        pb.Command(upload=upload),
    ]
    with closing(Lease(address, 1, snapshot(), wait_s=DEADLINE_S)) as lease, channel_to(address) as channel:
        attach = pb.Attach(protocol=PROTOCOL, job=lease.job, cores=[0])
        compiled, done = threading.Event(), threading.Event()

        def messages() -> Iterator[pb.Commands]:
            yield pb.Commands(commands=[pb.Command(attach=attach)])
            yield pb.Commands(commands=commands)
            assert compiled.wait(DEADLINE_S)
            run = pb.Execute(sequence=1, program=2, cores=[0], arguments=[1], first_result=3)
            read = pb.Download(request=4, array=3)
            yield pb.Commands(commands=[pb.Command(execute=run), pb.Command(download=read)])
            assert done.wait(DEADLINE_S)
            yield pb.Commands(commands=[pb.Command(goodbye=pb.Goodbye())])

        found = {}
        for answers in worker_pb2_grpc.WorkerStub(channel).Session(messages(), timeout=DEADLINE_S):
            for answer in answers.answers:
                if answer.part.ends:
                    found[answer.part.request] = answer.part
                    (compiled if answer.part.request == 2 else done).set()
        assert found[4].data == bytes(8)
        assert not found[2].HasField("failure")
