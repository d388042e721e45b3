"""The commands of one client, on a real engine of one replica in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla.plugin import free_ports
from polyxla_bridge.abi import Code
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_encoding
from polyxla_xrt.protocol.channels import CHUNK_BYTES
from polyxla_xrt.server.worker.incoming_array import IncomingArray, MisuseError
from polyxla_xrt.server.worker.session import MemoryBudget, Session

TIMEOUT_S = 60
OPTIONS = xla_client.CompileOptions().SerializeAsString()
COUNT = 1 << 18
BYTES = 4 * COUNT
LIMIT = 6 * BYTES
ADD = f"""HloModule adding
ENTRY main {{ x = f32[{COUNT}] parameter(0) y = f32[{COUNT}] parameter(1)
  ROOT s = f32[{COUNT}] add(x, y) }}"""
TAKE = ADD.replace("adding", "taking, input_output_alias={ {}: (0, {}, must-alias) }")
SPLIT = """HloModule splitting
ENTRY main { x = f32[4] parameter(0) y = f32[4] negate(x) z = s32[] constant(7)
  ROOT t = (f32[4], s32[]) tuple(y, z) }"""


class Peer:
    """A session, and the answers that it sent."""

    def __init__(self, engine: JaxEngine, cores: Sequence[int] = (0,)) -> None:
        self.budget = MemoryBudget(LIMIT, "ann@here")
        self.broken: list[str] = []
        self._parts: dict[int, list[pb.Part]] = {}
        self._ran: dict[int, pb.Executed] = {}
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(2)
        self.session = Session(
            engine, cores, self.budget, self._pool, self._record, lambda name, _: self.broken.append(name)
        )
        self._sequence = 0

    def _record(self, message: pb.Answer | bulk_encoding.BulkMessage, size: int) -> bool:
        (answer,) = pb.Answers.FromString(bulk_encoding.encode([message])).answers
        with self._changed:
            if answer.HasField("executed"):
                self._ran[answer.executed.sequence] = answer.executed
            else:
                self._parts.setdefault(answer.part.request, []).append(answer.part)
                assert size == len(answer.part.data) + len(answer.part.failure.message)
            self._changed.notify_all()
        return True

    def ran(self, sequence: int) -> pb.Failure:
        with self._changed:
            assert self._changed.wait_for(lambda: sequence in self._ran, TIMEOUT_S)
        return self._ran[sequence].failure

    def part(self, request: int) -> tuple[bytes, pb.Failure]:
        """Wait for an answer; return it whole, with its failure."""
        with self._changed:
            parts = self._parts.setdefault(request, [])
            assert self._changed.wait_for(lambda: bool(parts and parts[-1].ends), TIMEOUT_S)
        return b"".join(part.data for part in parts), parts[-1].failure

    def do(self, **command: Any) -> None:
        self.session.handle(pb.Command(**command))

    def upload(self, array: int, data: bytes, dtype: str = "float32", dims: Sequence[int] = (COUNT,)) -> None:
        type_ = pb.ArrayType(dtype=dtype, dims=dims)
        self.do(upload=pb.Upload(array=array, type=type_, data=data, ends=True))

    def full(self, array: int, value: float) -> None:
        self.upload(array, np.full(COUNT, value, np.float32).tobytes())

    def compiled(self, request: int, text: str, options: bytes = OPTIONS) -> pb.Program:
        module = hlo_module_from_text(text).as_serialized_hlo_module_proto()
        self.do(compile=pb.Compile(request=request, options=options, hlo=module, ends=True))
        data, failure = self.part(request)
        assert not failure.message
        return pb.Program.FromString(data)

    def execute(
        self,
        program: int,
        arguments: Sequence[int],
        first: int,
        keep: Sequence[int] = (),
        cores: Sequence[int] = (0,),
    ) -> int:
        self._sequence += 1
        request = pb.Execute(sequence=self._sequence, program=program, cores=cores, first_result=first)
        request.arguments.extend(arguments)
        request.keep.extend(keep)
        self.do(execute=request)
        return self._sequence

    def download(self, array: int, request: int = 99) -> tuple[bytes, pb.Failure]:
        self._parts.pop(request, None)
        self.do(download=pb.Download(request=request, array=array))
        return self.part(request)

    def value(self, array: int) -> float:
        data, failure = self.download(array)
        assert not failure.message
        return float(np.frombuffer(data, np.float32)[0])

    def close(self) -> None:
        self.session.close()
        self._pool.shutdown()


@pytest.fixture(scope="module")
def engine() -> Iterator[JaxEngine]:
    engine = JaxEngine(BridgeSettings())
    yield engine
    engine.close()


@pytest.fixture
def peer(engine: JaxEngine) -> Iterator[Peer]:
    peer = Peer(engine)
    yield peer
    peer.close()
    assert peer.budget.held_bytes == 0


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_an_array_is_uploaded_and_downloaded_in_chunks(peer: Peer, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    type_ = pb.ArrayType(dtype="uint8", dims=[size])
    for start in range(0, size, 500_000):
        piece = data[start : start + 500_000]
        ends = start + 500_000 >= size
        peer.do(upload=pb.Upload(array=1, type=None if start else type_, data=piece, ends=ends))
    assert peer.download(1) == (data, pb.Failure())
    assert len(peer._parts[99]) == -(-size // CHUNK_BYTES)
    assert peer.budget.held_bytes == size


@pytest.mark.parametrize(("dtype", "dims"), [("bfloat16", (2, 3)), ("bool", ()), ("float32", (0, 5))])
def test_arrays_of_unusual_types_and_shapes(peer: Peer, dtype: str, dims: tuple[int, ...]) -> None:
    width = {"bfloat16": 2, "bool": 1, "float32": 4}[dtype]
    data = b"\x01" * (width * int(np.prod(dims)))
    peer.upload(1, data, dtype, dims)
    assert peer.download(1) == (data, pb.Failure())


def test_a_program_runs_and_its_results_are_numbered(peer: Peer) -> None:
    program = peer.compiled(5, SPLIT)
    assert (program.program, program.name, program.replicas) == (5, "splitting", 1)
    assert [(result.dtype, list(result.dims)) for result in program.results] == [
        ("float32", [4]),
        ("int32", []),
    ]
    peer.upload(1, np.array([1, 2, 3, 4], np.float32).tobytes(), dims=(4,))
    assert peer.ran(peer.execute(5, [1], first=20)) == pb.Failure()
    assert np.frombuffer(peer.download(20)[0], np.float32).tolist() == [-1, -2, -3, -4]
    assert np.frombuffer(peer.download(21)[0], np.int32).tolist() == [7]
    assert peer.budget.held_bytes == 16 + 16 + 4


def test_commands_are_queued_without_waiting(peer: Peer) -> None:
    peer.compiled(5, ADD)
    peer.full(1, 1.0)
    for number in range(1, 50):
        peer.execute(5, [number, number], first=number + 1)
        peer.do(release=pb.Release(arrays=[number]))
    assert peer.value(50) == float(2**49)
    assert peer.budget.held_bytes == BYTES


@pytest.mark.parametrize("keep", [(), (0,)])
def test_donated_memory_is_counted_once(peer: Peer, keep: tuple[int, ...]) -> None:
    peer.compiled(5, TAKE)
    peer.full(1, 1.0)
    peer.full(2, 2.0)
    assert peer.ran(peer.execute(5, [1, 2], first=3, keep=keep)) == pb.Failure()
    assert peer.value(3) == 3.0
    assert peer.budget.held_bytes == (3 if keep else 2) * BYTES
    if keep:
        assert peer.value(1) == 1.0
    else:
        _, failure = peer.download(1)
        assert failure.code == Code.INVALID_ARGUMENT
        assert "this array was donated to a program" in failure.message


def test_a_copy_is_independent_of_its_source(peer: Peer) -> None:
    peer.full(1, 5.0)
    peer.do(copy=pb.Copy(array=2, source=1))
    peer.do(release=pb.Release(arrays=[1]))
    assert peer.value(2) == 5.0
    assert peer.budget.held_bytes == BYTES


def test_stats_report_the_memory_of_arrays(peer: Peer) -> None:
    for number in range(3):
        peer.full(number, 1.0)
    peer.do(stats=pb.Stats(request=7))
    assert pb.Memory.FromString(peer.part(7)[0]).bytes["bytes_in_use"] >= 3 * BYTES


def test_a_released_array_is_gone_and_a_second_release_is_ignored(peer: Peer) -> None:
    peer.compiled(5, ADD)
    peer.full(1, 1.0)
    for _ in range(2):
        peer.do(release=pb.Release(arrays=[1, 77], programs=[5, 78]))
    assert peer.download(1)[1].code == Code.NOT_FOUND
    assert peer.ran(peer.execute(5, [1], first=9)).code == Code.NOT_FOUND


@pytest.mark.parametrize("array", [7, 2**64 - 1])
def test_arrays_and_programs_of_another_session_are_not_found(
    peer: Peer, engine: JaxEngine, array: int
) -> None:
    other = Peer(engine)
    other.compiled(5, ADD)
    other.full(array, 1.0)
    _, failure = peer.download(array)
    assert (failure.code, failure.message) == (Code.NOT_FOUND, f"this session has no array {array}")
    assert "this session has no program 5" in peer.ran(peer.execute(5, [array, array], first=1)).message
    peer.compiled(5, ADD)
    assert peer.ran(peer.execute(5, [array, array], first=1)).code == Code.NOT_FOUND
    # So are its results, which the client may already use.
    assert peer.download(1)[1].code == Code.NOT_FOUND
    peer.do(copy=pb.Copy(array=2, source=array))
    assert peer.download(2)[1].code == Code.NOT_FOUND
    other.close()


def test_an_array_over_the_limit_fails_and_so_do_its_uses(peer: Peer) -> None:
    peer.compiled(5, ADD)
    peer.full(1, 1.0)
    large = LIMIT // 4
    for start, ends in ((0, False), (1, True)):
        type_ = None if start else pb.ArrayType(dtype="float32", dims=[large])
        peer.do(upload=pb.Upload(array=2, type=type_, data=bytes(2 * large), ends=ends))
    _, failure = peer.download(2)
    assert failure.code == Code.RESOURCE_EXHAUSTED
    assert "the job of ann@here may hold 6 MiB of this worker's memory, holds 1 MiB" in failure.message
    assert peer.value(1) == 1.0
    for number in range(3, 8):
        peer.execute(5, [1, 1], first=number)
    late = peer.ran(peer.execute(5, [1, 1], first=8))
    assert late.code == Code.RESOURCE_EXHAUSTED
    assert "out of memory for adding: the job of ann@here" in late.message
    assert peer.ran(peer.execute(5, [8, 1], first=9)).code == Code.RESOURCE_EXHAUSTED
    peer.do(release=pb.Release(arrays=list(range(3, 8))))
    assert peer.ran(peer.execute(5, [1, 1], first=10)) == pb.Failure()


SORT = """HloModule sorting
less { a = f32[] parameter(0) b = f32[] parameter(1) ROOT r = pred[] compare(a, b), direction=LT }
ENTRY main { x = f32[] parameter(0) y = f32[COUNT] broadcast(x), dimensions={}
  i = f32[COUNT] iota(), iota_dimension=0 m = f32[COUNT] multiply(i, y)
  s = f32[COUNT] sort(m), dimensions={0}, to_apply=less ROOT r = f32[1] slice(s), slice={[0:1]} }"""


@pytest.mark.parametrize(("of_limit", "code"), [(2, Code.RESOURCE_EXHAUSTED), (0.25, 0)])
def test_temporary_arrays_over_the_limit_fail(peer: Peer, of_limit: float, code: int) -> None:
    peer.compiled(5, SORT.replace("COUNT", str(int(of_limit * LIMIT) // 4)))
    peer.upload(1, np.float32(-1).tobytes(), "float32", ())
    failure = peer.ran(peer.execute(5, [1], first=2))
    assert failure.code == code
    assert ("out of memory for sorting: the job of ann@here" in failure.message) == bool(code)
    assert peer.budget.held_bytes == (4 if code else 8)


def test_a_copy_over_the_limit_fails_and_so_do_its_uses(peer: Peer) -> None:
    peer.compiled(5, ADD)
    for number in range(6):
        peer.full(number, 1.0)
    peer.do(copy=pb.Copy(array=7, source=1))
    assert peer.download(7)[1].code == Code.RESOURCE_EXHAUSTED
    peer.do(release=pb.Release(arrays=[2]))
    assert peer.ran(peer.execute(5, [7, 1], first=8)).code == Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("dtype", "dims"), [("float32", (COUNT // 2,)), ("int32", (COUNT,)), ("float32", (COUNT // 2, 2))]
)
def test_arguments_of_another_type_are_refused_before_anything_runs(
    peer: Peer, dtype: str, dims: tuple[int, ...]
) -> None:
    peer.compiled(5, TAKE)
    peer.full(1, 1.0)
    peer.upload(2, bytes(4 * int(np.prod(dims))), dtype, dims)
    for arguments in ([1, 2], [1], [1, 1, 1], []):
        failure = peer.ran(peer.execute(5, arguments, first=10 * len(arguments) + 10))
        assert failure.code == Code.INVALID_ARGUMENT
        wrong = "argument 1 of taking must be" if len(arguments) == 2 else "taking takes 2 arguments, not"
        assert wrong in failure.message
    assert peer.value(1) == 1.0


def test_a_failure_is_not_longer_than_a_message_may_be(peer: Peer) -> None:
    peer.compiled(5, ADD)
    peer.upload(1, b"\x00", "bool", ())
    failure = peer.ran(peer.execute(5, [1] * 100_000, first=2))
    assert failure.code == Code.INVALID_ARGUMENT
    assert failure.message == "adding takes 2 arguments, not 100000"


def test_donating_one_array_twice_fails_and_the_session_continues(peer: Peer) -> None:
    peer.compiled(
        5,
        f"""HloModule both, input_output_alias={{ {{0}}: (0, {{}}, may-alias), {{1}}: (1, {{}}, may-alias) }}
        ENTRY main {{ x = f32[{COUNT}] parameter(0) y = f32[{COUNT}] parameter(1) a = f32[{COUNT}] add(x, y)
          b = f32[{COUNT}] subtract(x, y) ROOT t = (f32[{COUNT}], f32[{COUNT}]) tuple(a, b) }}""",
    )
    peer.full(1, 1.0)
    assert peer.ran(peer.execute(5, [1, 1], first=2)).message
    peer.full(4, 4.0)
    assert peer.value(4) == 4.0


@pytest.mark.parametrize("method", ["execute", "copy"])
def test_memory_for_what_the_engine_refuses_at_once_is_given_back(
    peer: Peer, engine: JaxEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def refuse(*_: Any) -> Any:
        raise PjrtError(Code.UNAVAILABLE, "the engine ends")

    peer.compiled(5, ADD)
    peer.full(1, 1.0)
    monkeypatch.setattr(engine, method, refuse)
    peer.do(copy=pb.Copy(array=2, source=1))
    peer.execute(5, [1, 1], first=3)
    monkeypatch.undo()
    # One of the two is refused, and the other counts beside the array that was uploaded.
    assert peer.budget.held_bytes == 2 * BYTES
    refused = 3 if method == "execute" else 2
    assert peer.download(refused)[1].message == "the engine ends"


def test_an_invalid_program_is_refused(peer: Peer) -> None:
    for request, hlo in ((1, b""), (2, b"\xff" * 100), (3, b"\x0a\x03abc")):
        peer.do(compile=pb.Compile(request=request, options=OPTIONS, hlo=hlo, ends=True))
        assert peer.part(request)[1].message
    assert peer.compiled(4, ADD).name == "adding"


def piece(array: int = 1, data: bytes = b"", ends: bool = False, **more: Any) -> pb.Command:
    type_ = pb.ArrayType(dtype=more.pop("dtype", "uint8"), dims=more.pop("dims", [4]))
    return pb.Command(upload=pb.Upload(array=array, type=type_, data=data, ends=ends, **more))


EXECUTE = pb.Command(execute=pb.Execute(sequence=1))


@pytest.mark.parametrize(
    ("commands", "says"),
    [
        ([pb.Command()], "a command of kind None"),
        ([pb.Command(attach=pb.Attach())], "a command of kind 'attach'"),
        ([pb.Command(goodbye=pb.Goodbye())], "a command of kind 'goodbye'"),
        ([piece(dtype="invalid")], "'invalid' is not a dtype"),
        ([piece(dtype="token")], "'token' is not a dtype"),
        ([piece(dtype="x" * 100_000)], "is not a dtype"),
        ([piece(dims=[-1])], r"cannot have the dimensions \[-1\]"),
        ([piece(dims=[1] * 10_000)], "more than"),
        ([piece(dims=[2**62, 2**62])], "is too large"),
        ([piece(data=b"12345", ends=True)], "array 1 has 5 bytes, not 4"),
        ([piece(data=b"12345")], "array 1 has 5 bytes, not 4"),
        ([piece(data=b"123", ends=True)], "array 1 has 3 bytes, not 4"),
        ([piece(data=b"123"), piece(data=b"45")], "array 1 has 5 bytes, not 4"),
        ([piece(data=b"123"), piece(2, b"4", True)], "a chunk of array 2 came amid array 1"),
        ([piece(data=b"1234", ends=True)] * 2, "array 1 already exists"),
        ([piece(data=b"123"), EXECUTE], "execute came before the rest of array 1"),
        ([piece(core=1)], r"core 1 is not one of this session's, \[0\]"),
        ([pb.Command(execute=pb.Execute(cores=[0, 9]))], r"core 9 is not one of this session's, \[0\]"),
        ([pb.Command(execute=pb.Execute())], "an execution on 0 cores"),
        ([pb.Command(execute=pb.Execute(cores=[0, 0], arguments=[1]))], "on 2 cores cannot have 1 arguments"),
        ([pb.Command(stats=pb.Stats(core=9))], r"core 9 is not one of this session's, \[0\]"),
        ([piece(data=b"1234", ends=True), pb.Command(copy=pb.Copy(array=1))], "array 1 already exists"),
        ([pb.Command(compile=pb.Compile(request=1)), EXECUTE], "came before the rest of a program"),
        ([pb.Command(compile=pb.Compile(request=n)) for n in (1, 2)], "a chunk of another program"),
    ],
)
def test_a_protocol_violation_raises_misuse_error(peer: Peer, commands: list[pb.Command], says: str) -> None:
    for command in commands[:-1]:
        peer.session.handle(command)
    with pytest.raises(MisuseError, match=says) as caught:
        peer.session.handle(commands[-1])
    assert len(str(caught.value)) < 1000


def test_releases_may_come_between_chunks(peer: Peer) -> None:
    peer.full(1, 1.0)
    peer.session.handle(piece(2, b"12"))
    peer.do(release=pb.Release(arrays=[1]))
    peer.session.handle(piece(2, b"34", True))
    assert peer.download(2)[0] == b"1234"
    peer.do(compile=pb.Compile(request=5, hlo=b"a"))
    peer.do(release=pb.Release(arrays=[2]))
    assert peer.budget.held_bytes == 0


def test_closing_returns_the_memory_of_an_incomplete_array(peer: Peer) -> None:
    peer.session.handle(piece(2, b"12"))
    assert peer.budget.held_bytes == 4
    peer.session.close()
    peer.session.close()
    assert peer.budget.held_bytes == 0


@pytest.mark.parametrize("at", ["from_host", "add"])
def test_a_session_that_is_closed_amid_an_upload_returns_its_memory_once(
    engine: JaxEngine, peer: Peer, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def closing(do: Callable[..., Any]) -> Callable[..., Any]:
        def closed(*given: Any) -> Any:
            # Another thread closes it, twice, while the reader carries out a command.
            peer.session.close()
            found = do(*given)
            peer.session.close()
            return found

        return closed

    peer.full(1, 1.0)
    monkeypatch.setattr(engine, "from_host", closing(engine.from_host))
    if at == "add":
        monkeypatch.setattr(IncomingArray, "add", closing(IncomingArray.add))
    peer.full(2, 2.0)
    assert peer.budget.held_bytes == 0
    assert peer.session._arrays == {}


class Answers:
    def __init__(self) -> None:
        self.sent = 0

    def __call__(self, answer: pb.Answer | bulk_encoding.BulkMessage, size: int) -> bool:
        self.sent += 1
        return False


def test_no_more_answers_are_sent_to_a_client_that_has_gone(engine: JaxEngine) -> None:
    answers: Callable[[pb.Answer | bulk_encoding.BulkMessage, int], bool] = Answers()
    with ThreadPoolExecutor(1) as pool:
        session = Session(engine, [0], MemoryBudget(LIMIT, ""), pool, answers, lambda *_: None)
        type_ = pb.ArrayType(dtype="uint8", dims=[5 * CHUNK_BYTES])
        for number in range(5):
            upload = pb.Upload(array=1, type=type_, data=bytes(CHUNK_BYTES), ends=number == 4)
            session.handle(pb.Command(upload=upload))
        session.handle(pb.Command(download=pb.Download(request=1, array=1)))
        engine._readers.submit(int).result(TIMEOUT_S)
        assert engine.finish(TIMEOUT_S)
        session.close()
    assert isinstance(answers, Answers)
    assert answers.sent == 1


# Partitioned programs (SPMD), on an engine of two replicas.

PARTS = """HloModule parts, num_partitions=2, input_output_alias={ {1}: (0, {}, must-alias) }
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
ENTRY main { x = f32[8] parameter(0), sharding={devices=[2]<=[2]}
  zero = f32[] constant(0)
  s = f32[] reduce(x, zero), dimensions={0}, to_apply=add, sharding={replicated}
  y = f32[8] multiply(x, x), sharding={devices=[2]<=[2]}
  ROOT t = (f32[], f32[8]) tuple(s, y), sharding={{replicated}, {devices=[2]<=[2]}} }"""
Connect = Callable[..., Peer]


def in_two_parts() -> bytes:
    options = xla_client.CompileOptions()
    options.num_partitions = 2
    options.executable_build_options.use_spmd_partitioning = True
    data: bytes = options.SerializeAsString()
    return data


@pytest.fixture(scope="module")
def engine_of_two() -> Iterator[JaxEngine]:
    engine = JaxEngine(BridgeSettings(2, 1, 0, f"127.0.0.1:{free_ports(1)[0]}"))
    yield engine
    engine.close()


@pytest.fixture
def connect(engine_of_two: JaxEngine) -> Iterator[Connect]:
    """Return a function that begins a session with these cores, one half of an array on each."""
    peers = []

    def begin(*cores: int) -> Peer:
        peers.append(peer := Peer(engine_of_two, cores))
        for number, core in enumerate(cores, 1):
            half = np.arange(4, dtype=np.float32) + 4 * core
            type_ = pb.ArrayType(dtype="float32", dims=[4])
            peer.do(upload=pb.Upload(array=number, type=type_, core=core, data=half.tobytes(), ends=True))
        program = peer.compiled(5, PARTS, in_two_parts())
        assert (program.replicas, program.partitions) == (1, 2)
        return peer

    yield begin
    for peer in peers:
        peer.close()
        assert peer.budget.held_bytes == 0


def halves(peer: Peer, *arrays: int) -> list[list[float]]:
    found = [peer.download(array) for array in arrays]
    assert not any(failure.message for _, failure in found)
    return [np.frombuffer(data, np.float32).tolist() for data, _ in found]


def test_one_execution_computes_the_parts_of_all_cores(connect: Connect) -> None:
    peer = connect(0, 1)
    assert not peer.ran(peer.execute(5, [1, 2], 10, cores=[0, 1])).message
    assert halves(peer, 10, 11, 12, 13) == [[28], [0, 1, 4, 9], [28], [16, 25, 36, 49]]
    # The halves were donated.
    assert peer.budget.held_bytes == 2 * (4 + 16)
    assert "donated" in peer.download(1)[1].message


def test_a_kept_argument_is_not_donated(connect: Connect) -> None:
    peer = connect(0, 1)
    assert not peer.ran(peer.execute(5, [1, 2], 10, keep=[0], cores=[0, 1])).message
    assert halves(peer, 1, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("cores", [[0], [1, 0], [0, 0]])
def test_a_partitioned_program_needs_all_cores_in_their_order(connect: Connect, cores: list[int]) -> None:
    peer = connect(0, 1)
    failure = peer.ran(peer.execute(5, [1, 2], 10, cores=cores))
    assert failure.code == Code.INVALID_ARGUMENT
    assert failure.message == f"parts has 2 partitions: it cannot run on cores {cores} of this worker"
    # The results exist, with the same error.
    assert peer.download(11)[1] == failure


def test_a_session_with_some_of_the_cores_runs_no_partitioned_program(connect: Connect) -> None:
    peer = connect(1)
    failure = peer.ran(peer.execute(5, [1], 10, cores=[1]))
    assert failure.message == "parts has 2 partitions: it cannot run on cores [1] of this worker"
    # The process that drives the other core waits for it.
    assert peer.broken == ["parts"]


def test_an_argument_that_is_missing_on_one_core_fails_on_all(connect: Connect) -> None:
    peer = connect(0, 1)
    failure = peer.ran(peer.execute(5, [1, 77], 10, cores=[0, 1]))
    assert (failure.code, failure.message) == (Code.NOT_FOUND, "this session has no array 77")
    assert [peer.download(array)[1] for array in (10, 11, 12, 13)] == [failure] * 4
    # No other process waits: the program may catch the error and go on.
    assert peer.broken == []


def test_the_results_of_all_cores_count_in_the_budget(connect: Connect) -> None:
    peer = connect(0, 1)
    peer.upload(3, bytes(LIMIT - 2 * 16 - 39), "uint8", [LIMIT - 2 * 16 - 39])
    failure = peer.ran(peer.execute(5, [1, 2], 10, cores=[0, 1]))
    assert failure.code == Code.RESOURCE_EXHAUSTED
    assert failure.message.startswith("out of memory for parts")
