"""The contract of `polyxla_bridge.engine.engine.Engine`, as tests.

Importing this module imports pytest, which the package does not require, and jaxlib. A test module subclasses
`EngineConformance`, and has a fixture `open_engine`; one for an engine that limits the memory of its devices
also subclasses `MemoryLimitConformance`, and has a fixture `open_limited`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.abi import DTYPES, Code
from polyxla_bridge.engine.engine import Buffer, Engine
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_bridge.programs.hlo_pb2 import CompileOptionsProto

TIMEOUT_S = 60
OPTIONS = xla_client.CompileOptions().SerializeAsString()
XLAS_DEFAULTS = CompileOptionsProto(
    executable_build_options={"device_ordinal": -1, "num_replicas": 1, "num_partitions": 1}
).SerializeToString()
"""Options as torch_xla sends them. Those above turn off some of XLA's defaults."""
OpenEngine = Callable[[int], Engine]
"""Opens an engine with a number of devices, all of them in this process. The fixture closes it."""
OpenLimited = Callable[[int], Engine]
"""Opens an engine with one device, whose memory is limited to a number of bytes. The fixture closes it."""
COUNT = 1 << 18
BYTES = 4 * COUNT
"""Size of an array in `MemoryLimitConformance`."""

DONATING = """HloModule donating, input_output_alias={ {0}: (0, {}, may-alias) }
ENTRY main { x = f32[4] parameter(0) y = f32[4] parameter(1) s = f32[4] add(x, y) k = f32[] constant(1)
  ROOT t = (f32[4], f32[]) tuple(s, k) }"""
DOUBLING = "HloModule doubling\nENTRY main { x = f32[] parameter(0) ROOT y = f32[] add(x, x) }"
ADD = "add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }"
DECOMPOSING = """HloModule decomposing
ENTRY main { x = f32[2,2] parameter(0)
  ROOT r = (f32[2,2], s32[2], s32[2]) custom-call(x), custom_call_target="LuDecomposition" }"""
"""An instruction that TorchTPU leaves to a TPU's compiler."""
SUMMING = """HloModule summing
step { a = s64[] parameter(0) b = s64[] parameter(1) c = s64[] add(a, b)
  ROOT t = (s64[], s64[]) tuple(c, c) }
ENTRY main { x = s64[5] parameter(0) i = s64[] parameter(1)
  ROOT r = (s64[5], s64[]) scan(x, i), dimensions={0}, num_carries=1, is_associative=true, to_apply=step }"""
"""A cumulative sum as TorchTPU writes it, of integers beyond 32 bits."""
# Runs long enough that whatever follows finds it running.
SLOW = """HloModule slow
body { p = (s32[], f32[4096]) parameter(0) i = s32[] get-tuple-element(p), index=0
  x = f32[4096] get-tuple-element(p), index=1 one = s32[] constant(1) j = s32[] add(i, one)
  y = f32[4096] sine(x) ROOT t = (s32[], f32[4096]) tuple(j, y) }
condition { p = (s32[], f32[4096]) parameter(0) i = s32[] get-tuple-element(p), index=0
  end = s32[] constant(20000) ROOT less = pred[] compare(i, end), direction=LT }
ENTRY main { x = f32[4096] parameter(0) zero = s32[] constant(0) t = (s32[], f32[4096]) tuple(zero, x)
  w = (s32[], f32[4096]) while(t), condition=condition, body=body
  ROOT r = f32[4096] get-tuple-element(w), index=1 }"""


def module(text: str) -> bytes:
    """Return a serialised HloModuleProto."""
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


def compiled(engine: Engine, text: str) -> Executable:
    """Compile a program, which is written in HLO's text format."""
    return engine.compile(module(text), OPTIONS)


def upload(engine: Engine, host: Any, index: int = 0) -> Buffer:
    """Copy an array to a device."""
    array = np.asarray(host, order="C")
    type_ = ArrayType(array.dtype.name, array.shape)
    # Flattened, because NumPy cannot view an array without dimensions as bytes.
    return engine.from_host(engine.devices[index], type_, array.reshape(-1).view(np.uint8).data)


def download(engine: Engine, buffer: Buffer) -> Any:
    """Return an array from a device."""
    data = engine.to_host(buffer).result(TIMEOUT_S)
    dtype = getattr(ml_dtypes, buffer.type.dtype, None) or buffer.type.dtype
    return np.frombuffer(data, dtype).reshape(buffer.type.dims)


def ones(value: float) -> Any:
    """Return an array of four equal numbers."""
    return np.full(4, value, np.float32)


def options_for(devices: list[int], partitions: int = 1) -> bytes:
    """Return the options of a program for some devices, all of one partition first."""
    chosen = xla_client.CompileOptions()
    chosen.num_replicas, chosen.num_partitions = len(devices) // partitions, partitions
    build = chosen.executable_build_options
    build.num_replicas, build.num_partitions = chosen.num_replicas, partitions
    build.use_spmd_partitioning = partitions > 1
    # XLA's array has a row for each replica and a column for each partition.
    assignment = np.array(devices, np.int32).reshape(partitions, -1).T
    chosen.device_assignment = xla_client.DeviceAssignment.create(np.ascontiguousarray(assignment))
    serialized: bytes = chosen.SerializeAsString()
    return serialized


SORTING = """HloModule sorting
less { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = pred[] compare(a, b), direction=LT }
ENTRY main { x = f32[4] parameter(0) ROOT r = f32[4] sort(x), dimensions={0}, to_apply=less }"""
EXTREMES = """HloModule extremes
larger { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = f32[] maximum(a, b) }
smaller { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = f32[] minimum(a, b) }
ENTRY main { x = f32[4] parameter(0) low = f32[] constant(-3e38) high = f32[] constant(3e38)
  max = f32[] reduce(x, low), dimensions={0}, to_apply=larger
  min = f32[] reduce(x, high), dimensions={0}, to_apply=smaller
  pooled = f32[2] reduce-window(x, low), window={size=2 stride=2}, to_apply=larger
  one = f32[] constant(1) ones = f32[4] broadcast(one), dimensions={}
  least = f32[4] maximum(x, ones) clamped = f32[4] clamp(ones, x, ones)
  ROOT t = (f32[], f32[], f32[2], f32[4], f32[4]) tuple(max, min, pooled, least, clamped) }"""


class EngineConformance:
    """Every engine passes these tests."""

    @pytest.mark.parametrize(
        "dtype", [name for name in DTYPES if name not in ("invalid", "token", "int2", "uint2")]
    )
    def test_arrays_of_every_dtype_return_unchanged(self, open_engine: OpenEngine, dtype: str) -> None:
        engine = open_engine(1)
        # NumPy has no bfloat16, no float8 and no int4; ml_dtypes adds them.
        host = np.array([[1, 2, 1], [1, 1, 2]]).astype(getattr(ml_dtypes, dtype, None) or dtype)
        buffer = upload(engine, host)
        assert buffer.type == ArrayType(dtype, (2, 3))
        assert np.array_equal(download(engine, buffer), host)

    @pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (3, 1, 2)])
    def test_arrays_of_odd_shapes_return_unchanged(
        self, open_engine: OpenEngine, shape: tuple[int, ...]
    ) -> None:
        engine = open_engine(1)
        host = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        assert np.array_equal(download(engine, upload(engine, host)), host)

    def test_results_are_row_major_whatever_the_devices_layout(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        text = """HloModule turned, entry_computation_layout={(f32[2,3]{1,0})->f32[3,2]{0,1}}
            ENTRY main { x = f32[2,3]{1,0} parameter(0)
              ROOT t = f32[3,2]{0,1} transpose(x), dimensions={1,0} }"""
        host = np.arange(6, dtype=np.float32).reshape(2, 3)
        (turned,) = engine.execute(compiled(engine, text), engine.devices[0], [upload(engine, host)])
        assert np.array_equal(download(engine, turned), host.T)

    def test_an_array_is_read_into_memory_of_the_reader(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        host, memory = np.arange(1000, dtype=np.float32), memoryview(bytearray(4000))
        assert engine.to_host(upload(engine, host), memory).result(TIMEOUT_S) is memory
        assert np.array_equal(np.frombuffer(memory, np.float32), host)

    def test_results_have_their_types_before_they_are_computed(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        donating = compiled(engine, DONATING)
        types = (ArrayType("float32", (4,)), ArrayType("float32", ()))
        assert (donating.name, donating.outputs, donating.num_replicas) == ("donating", types, 1)
        results = engine.execute(
            donating, engine.devices[0], [upload(engine, ones(1)), upload(engine, ones(2))]
        )
        assert tuple(result.type for result in results) == types
        assert download(engine, results[0]).tolist() == [3] * 4
        assert download(engine, results[1]) == 1

    def test_executions_run_in_the_order_of_the_calls(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        doubling, buffer = compiled(engine, DOUBLING), upload(engine, np.float32(1))
        for _ in range(20):
            (buffer,) = engine.execute(doubling, engine.devices[0], [buffer])
        assert download(engine, buffer) == 2**20

    def test_a_donated_array_is_deleted(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        x, y = upload(engine, ones(1)), upload(engine, ones(2))
        total, _ = engine.execute(compiled(engine, DONATING), engine.devices[0], [x, y])
        assert (x.is_deleted, y.is_deleted) == (True, False)
        assert download(engine, total).tolist() == [3] * 4
        assert download(engine, y).tolist() == [2] * 4
        with pytest.raises(PjrtError, match=r"this array was (donated|given up)"):
            engine.to_host(x).result(TIMEOUT_S)

    def test_an_array_in_keep_is_not_donated(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        x, y = upload(engine, ones(1)), upload(engine, ones(2))
        donating = compiled(engine, DONATING)
        total, _ = engine.execute(donating, engine.devices[0], [x, y], keep=frozenset({0}))
        assert download(engine, total).tolist() == [3] * 4
        assert not x.is_deleted
        assert download(engine, x).tolist() == [1] * 4

    def test_a_read_before_a_donation_returns_the_old_values(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        donating, value, one = compiled(engine, DONATING), upload(engine, ones(0)), upload(engine, ones(1))
        reads = []
        for _ in range(20):
            reads.append(engine.to_host(value))
            value, _ = engine.execute(donating, engine.devices[0], [value, one])
        found = [np.frombuffer(read.result(TIMEOUT_S), np.float32).tolist() for read in reads]
        assert found == [[number] * 4 for number in range(20)]

    def test_a_deleted_array_serves_the_executions_that_are_queued(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        x = upload(engine, np.float32(3))
        (twice,) = engine.execute(compiled(engine, DOUBLING), engine.devices[0], [x])
        engine.delete(x)
        assert download(engine, twice) == 6
        with pytest.raises(PjrtError, match=r"this array was (deleted|given up)"):
            engine.to_host(x).result(TIMEOUT_S)

    def test_an_error_is_raised_where_the_result_is_read(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        donating = compiled(engine, DONATING)
        bad = upload(engine, np.zeros(3, np.float32))
        result, _ = engine.execute(donating, engine.devices[0], [bad, bad], keep=frozenset({0}))
        with pytest.raises(Exception, match=r"(?i)buffer|argument|size|shape"):
            engine.to_host(result).result(TIMEOUT_S)
        # Another program that needs the result fails too, and the device still works.
        (next_,) = engine.execute(compiled(engine, DOUBLING), engine.devices[0], [result])
        with pytest.raises(Exception, match=r"(?i)buffer|argument|size|shape"):
            engine.to_host(next_).result(TIMEOUT_S)
        (right,) = engine.execute(
            compiled(engine, DOUBLING), engine.devices[0], [upload(engine, np.float32(2))]
        )
        assert download(engine, right) == 4

    def test_an_array_that_was_never_uploaded_fails_with_its_own_error(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        device, doubling = engine.devices[0], compiled(engine, DOUBLING)
        value: Future[Any] = Future()
        value.set_exception(PjrtError(Code.RESOURCE_EXHAUSTED, "no room for it"))
        lost = Buffer(ArrayType("float32", ()), device, value)
        (result,) = engine.execute(doubling, device, [lost])
        (next_,) = engine.execute(doubling, device, [result])
        for buffer in (lost, result, next_, engine.copy(lost, device)):
            with pytest.raises(PjrtError, match="no room for it"):
                engine.to_host(buffer).result(TIMEOUT_S)
            engine.delete(buffer)
        (right,) = engine.execute(doubling, device, [upload(engine, np.float32(2))])
        assert download(engine, right) == 4

    def test_invalid_bytes_are_refused_by_the_compiler(self, open_engine: OpenEngine) -> None:
        with pytest.raises(Exception, match=r"(?i)pars|proto|hlo|module"):
            open_engine(1).compile(b"not a module", OPTIONS)

    def test_dynamic_shapes_are_refused(self, open_engine: OpenEngine) -> None:
        with pytest.raises(Exception, match="dynamic shapes are not supported"):
            compiled(open_engine(1), "HloModule grows\nENTRY main { ROOT x = f32[<=4] parameter(0) }")

    def test_a_serialised_program_can_be_loaded_and_run(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        original = compiled(engine, DONATING)
        back = engine.deserialize(engine.serialize(original))
        assert (back.name, back.outputs) == (original.name, original.outputs)
        x, y = upload(engine, ones(1)), upload(engine, ones(2))
        total, _ = engine.execute(back, engine.devices[0], [x, y])
        assert download(engine, total).tolist() == [3] * 4
        assert x.is_deleted

    def test_a_program_that_sorts_is_serialised_after_it_ran(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        numbers = np.array([3, 1, 4, 2], np.float32)
        program = compiled(engine, SORTING)
        for _ in range(2):
            (result,) = engine.execute(program, engine.devices[0], [upload(engine, numbers)])
            assert download(engine, result).tolist() == [1, 2, 3, 4]
            program = engine.deserialize(engine.serialize(program))

    def test_nan_survives_max_min_and_clamp(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        numbers = upload(engine, np.array([1, np.nan, 3, 1], np.float32))
        extremes = engine.compile(module(EXTREMES), XLAS_DEFAULTS)
        results = engine.execute(extremes, engine.devices[0], [numbers])
        found = [np.isnan(download(engine, result)).tolist() for result in results]
        assert found == [True, True, [True, False], *[[False, True, False, False]] * 2]

    def test_what_a_tpus_compiler_knows_is_computed(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        matrix = upload(engine, np.array([[1, 2], [4, 4]], np.float32))
        results = engine.execute(compiled(engine, DECOMPOSING), engine.devices[0], [matrix])
        factors, exchanged, order = (download(engine, result).tolist() for result in results)
        assert (factors, exchanged, order) == ([[4, 4], [0.25, 1]], [1, 1], [1, 0])
        given = [upload(engine, array) for array in (np.full(5, 1 << 40), np.int64(1))]
        sums, total = engine.execute(compiled(engine, SUMMING), engine.devices[0], given)
        assert download(engine, sums).tolist() == [1 + (step << 40) for step in range(1, 6)]
        assert download(engine, total) == 1 + (5 << 40)

    def test_bytes_that_are_no_program_are_refused(self, open_engine: OpenEngine) -> None:
        with pytest.raises(PjrtError, match="program"):
            open_engine(1).deserialize(b"something else")

    def test_live_arrays_are_counted(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        before = engine.memory_stats(engine.devices[0])["bytes_in_use"]
        buffer = upload(engine, np.zeros(1 << 20, np.uint8))
        assert download(engine, buffer).size == 1 << 20
        assert engine.memory_stats(engine.devices[0])["bytes_in_use"] - before == 1 << 20
        engine.delete(buffer)
        # An engine may free the memory after the call, in the order of its device's queue.
        deadline = time.monotonic() + TIMEOUT_S
        while engine.memory_stats(engine.devices[0])["bytes_in_use"] > before:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_a_program_that_sorts_runs_on_every_device(self, open_engine: OpenEngine) -> None:
        engine = open_engine(2)
        options = options_for([0, 1])
        program = engine.compile(module(SORTING), options)
        numbers = np.array([3, 1, 4, 2], np.float32)
        # One after the other: the second device gets the program when the first has run it.
        for device in engine.devices:
            (result,) = engine.execute(program, device, [upload(engine, numbers, device.index)])
            assert download(engine, result).tolist() == [1, 2, 3, 4]

    @pytest.mark.parametrize("count", [2, 8])
    def test_replicas_meet_in_collectives(self, open_engine: OpenEngine, count: int) -> None:
        engine = open_engine(count)
        text = f"""HloModule every, replica_count={count}
            {ADD}
            ENTRY main {{ x = f32[4] parameter(0) r = f32[4] all-reduce(x), replica_groups={{}}, to_apply=add
              i = f32[1,4] reshape(x)
              g = f32[{count},4] all-gather(i), replica_groups={{}}, dimensions={{0}}
              ROOT t = (f32[4], f32[{count},4]) tuple(r, g) }}"""
        every = compiled(engine, text)
        assert every.num_replicas == count
        for start in range(3):
            inputs = [upload(engine, ones(start + i), i) for i in range(count)]
            # No call may block, because each execution waits for those of the other devices.
            results = [engine.execute(every, device, [inputs[device.index]]) for device in engine.devices]
            expected = sum(start + i for i in range(count))
            for total, rows in results:
                assert download(engine, total).tolist() == [expected] * 4
                assert download(engine, rows)[:, 0].tolist() == [start + i for i in range(count)]

    @pytest.mark.parametrize("count", [2, 8])
    def test_replicas_with_different_programs_meet_in_collectives(
        self, open_engine: OpenEngine, count: int
    ) -> None:
        engine = open_engine(count)

        def text(replica: int) -> str:
            # As torch_xla writes a number: 0 and 1 as constants, others as arguments.
            number = f"k = f32[] constant({replica})" if replica < 2 else "k = f32[] parameter(1)"
            return f"""HloModule of_{replica}, replica_count={count}
                {ADD}
                ENTRY main {{ x = f32[] parameter(0) {number} y = f32[] multiply(x, k)
                  p = f32[1] reshape(y) z = f32[] constant(0)
                  w = f32[{count}] pad(p, z), padding={replica}_{count - 1 - replica}
                  ROOT r = f32[{count}] all-reduce(w), replica_groups={{}}, to_apply=add }}"""

        programs = [compiled(engine, text(replica)) for replica in range(count)]
        for start in (10, 20):
            results = []
            for replica, device in enumerate(engine.devices):
                arguments = [upload(engine, np.float32(start), replica)]
                if replica > 1:
                    arguments.append(upload(engine, np.float32(replica), replica))
                results += engine.execute(programs[replica], device, arguments)
            expected = [start * replica for replica in range(count)]
            assert [download(engine, result).tolist() for result in results] == [expected] * count

    def test_replicas_may_run_different_programs(self, open_engine: OpenEngine) -> None:
        engine = open_engine(2)
        # The second replica alone runs programs that the first never does.
        doubling, value = compiled(engine, DOUBLING), upload(engine, np.float32(1), 1)
        for _ in range(5):
            (value,) = engine.execute(doubling, engine.devices[1], [value])
        assert download(engine, value) == 32
        other = compiled(engine, DOUBLING.replace("doubling", "squaring").replace("add(", "multiply("))
        (square,) = engine.execute(other, engine.devices[0], [upload(engine, np.float32(5))])
        assert download(engine, square) == 25

    def test_an_array_is_copied_to_another_device(self, open_engine: OpenEngine) -> None:
        engine = open_engine(2)
        (twice,) = engine.execute(
            compiled(engine, DOUBLING), engine.devices[0], [upload(engine, np.float32(4))]
        )
        copy = engine.copy(twice, engine.devices[1])
        assert copy.device.index == 1
        (again,) = engine.execute(compiled(engine, DOUBLING), engine.devices[1], [copy])
        assert download(engine, again) == 16

    def test_a_partitioned_program_runs_on_all_devices(self, open_engine: OpenEngine) -> None:
        engine = open_engine(2)
        options = xla_client.CompileOptions()
        options.num_partitions = 2
        options.executable_build_options.use_spmd_partitioning = True
        options.executable_build_options.num_partitions = 2
        text = f"""HloModule parts
            {ADD}
            ENTRY main {{ x = f32[8] parameter(0), sharding={{devices=[2]0,1}} z = f32[] constant(0)
              y = f32[8] add(x, x), sharding={{devices=[2]0,1}}
              ROOT s = f32[] reduce(y, z), dimensions={{0}}, to_apply=add, sharding={{replicated}} }}"""
        parts = engine.compile(module(text), options.SerializeAsString())
        assert parts.num_partitions == 2
        rows = [[upload(engine, ones(1), 0)], [upload(engine, ones(2), 1)]]
        results = engine.execute_partitioned(parts, rows)
        assert [float(download(engine, row[0])) for row in results] == [24, 24]
        # As in PJRT: TorchTPU passes an array of one number for a scalar.
        columns = [[upload(engine, ones(index + 1).reshape(4, 1), index)] for index in range(2)]
        results = engine.execute_partitioned(parts, columns)
        assert [float(download(engine, row[0])) for row in results] == [24, 24]
        squares = [[upload(engine, ones(1).reshape(2, 2), index)] for index in range(2)]
        with pytest.raises(PjrtError, match=r"argument 0 of parts must be .*\(4,\).*, not .*\(2, 2\)"):
            download(engine, engine.execute_partitioned(parts, squares)[0][0])
        with pytest.raises(PjrtError, match=r"parts .*partition"):
            # Where an error is raised depends on where the engine checks.
            download(engine, engine.execute(parts, engine.devices[0], rows[0])[0])
        with pytest.raises(PjrtError, match="takes 1 arguments, not 2"):
            download(engine, engine.execute_partitioned(parts, [[*row, *row] for row in rows])[0][0])

    def test_closing_finishes_what_is_queued(self, open_engine: OpenEngine) -> None:
        engine = open_engine(1)
        slow = compiled(engine, SLOW)
        buffer = upload(engine, np.ones(4096, np.float32))
        reads = []
        for _ in range(3):
            (buffer,) = engine.execute(slow, engine.devices[0], [buffer])
            reads.append(engine.to_host(buffer))
        engine.close()
        assert not wait(reads, TIMEOUT_S).not_done
        assert all(read.exception() is None for read in reads)

    def test_threads_may_use_an_engine_at_once(self, open_engine: OpenEngine) -> None:
        engine = open_engine(2)
        doubling = compiled(engine, DOUBLING)
        found: list[float] = []

        def work(index: int) -> None:
            for number in range(50):
                (twice,) = engine.execute(
                    doubling, engine.devices[index], [upload(engine, np.float32(number), index)]
                )
                found.append(float(download(engine, twice)) - 2 * number)

        threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert found == [0] * 200


def large(engine: Engine, value: float) -> Buffer:
    """Copy an array of `BYTES` to the first device."""
    return upload(engine, np.full((512, 512), value, np.float32))


def adding(engine: Engine, alias: str = "") -> Executable:
    """Return a program for x + y and 1, which reuses the memory of x if there is an alias."""
    header = f", input_output_alias={{ {{0}}: (0, {{}}, {alias}) }}" if alias else ""
    return compiled(
        engine,
        f"""HloModule adding{header}
        ENTRY main {{ x = f32[512,512] parameter(0) y = f32[512,512] parameter(1)
          s = f32[512,512] add(x, y) k = f32[] constant(1)
          ROOT t = (f32[512,512], f32[]) tuple(s, k) }}""",
    )


# Each of its arrays has BYTES.
SQUARING = """HloModule squaring
    ENTRY main { x = f32[512,512] parameter(0)
      d = f32[512,512] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      e = f32[512,512] dot(d, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      ROOT f = f32[512,512] dot(e, d), lhs_contracting_dims={1}, rhs_contracting_dims={0} }"""


class MemoryLimitConformance:
    """Every engine that counts the memory of its devices passes these tests."""

    def test_arrays_beyond_the_memory_of_a_device_are_refused(self, open_limited: OpenLimited) -> None:
        engine = open_limited(4 * BYTES)
        arrays = [large(engine, value) for value in range(4)]
        with pytest.raises(
            PjrtError,
            match=r"an array of shape \(512, 512\) and dtype float32 needs 1,048,576 bytes of memory, but of "
            r"the device's 4,194,304 bytes 4,194,304 are in use \(POLYXLA_DEVICE_MEMORY sets the limit\)",
        ) as refused:
            large(engine, 4)
        assert refused.value.code == Code.RESOURCE_EXHAUSTED
        engine.delete(arrays.pop())
        assert download(engine, large(engine, 5))[0, 0] == 5

    def test_a_copy_beyond_the_memory_of_a_device_is_refused(self, open_limited: OpenLimited) -> None:
        engine = open_limited(3 * BYTES)
        arrays = [large(engine, value) for value in range(2)]
        arrays.append(engine.copy(arrays[1], engine.devices[0]))
        assert download(engine, arrays[2])[0, 0] == 1
        with pytest.raises(PjrtError, match=r"dtype float32 needs 1,048,576 .* 3,145,728 are in use"):
            download(engine, engine.copy(arrays[1], engine.devices[0]))
        engine.delete(arrays.pop())
        assert download(engine, engine.copy(arrays[1], engine.devices[0]))[0, 0] == 1

    def test_a_program_is_refused_while_its_results_have_no_place(self, open_limited: OpenLimited) -> None:
        engine = open_limited(4 * BYTES)
        add = adding(engine)
        arrays = [large(engine, value) for value in range(4)]
        total, _ = engine.execute(add, engine.devices[0], arrays[:2])
        with pytest.raises(
            PjrtError, match="program adding needs 1,048,580 bytes of memory, but of the device's 4,194,304"
        ) as refused:
            download(engine, total)
        assert refused.value.code == Code.RESOURCE_EXHAUSTED
        assert engine.memory_stats(engine.devices[0])["bytes_in_use"] == 4 * BYTES
        assert engine.memory_stats(engine.devices[0])["bytes_limit"] == 4 * BYTES
        engine.delete(arrays.pop())
        engine.delete(arrays.pop())
        total, _ = engine.execute(add, engine.devices[0], arrays)
        assert download(engine, total)[0, 0] == 1

    def test_a_donated_array_makes_place_for_a_result(self, open_limited: OpenLimited) -> None:
        engine = open_limited(4 * BYTES)
        add = adding(engine, "may-alias")
        arrays = [large(engine, value) for value in range(3)]
        for _ in range(3):
            arrays[0], one = engine.execute(add, engine.devices[0], arrays[:2])
            engine.delete(one)
        assert download(engine, arrays[0])[0, 0] == 3

    def test_temporary_arrays_make_place_for_those_of_the_next_program(
        self, open_limited: OpenLimited
    ) -> None:
        engine = open_limited(5 * BYTES)
        squaring, x = compiled(engine, SQUARING), large(engine, 0)
        for _ in range(20):
            # The results of two programs, and the temporary arrays of one.
            (x,) = engine.execute(squaring, engine.devices[0], [x])
        assert download(engine, x)[0, 0] == 0
        assert engine.finish(TIMEOUT_S)
        stats = engine.memory_stats(engine.devices[0])
        assert stats["bytes_in_use"] == BYTES
        assert 4 * BYTES <= stats["peak_bytes_in_use"] <= 5 * BYTES

    def test_a_program_that_cannot_fit_is_refused_when_it_is_compiled(
        self, open_limited: OpenLimited
    ) -> None:
        with pytest.raises(
            PjrtError, match=r"squaring needs 4,194,\d{3} bytes of memory, but the device has 3,145,728 bytes"
        ) as refused:
            compiled(open_limited(3 * BYTES), SQUARING)
        assert refused.value.code == Code.RESOURCE_EXHAUSTED
