"""SPMD: one process with all devices, or several with their shares, compute one partitioned program."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.abi import Code
from polyxla_bridge.engine.compiler import COMPILER
from polyxla_bridge.engine.engine import Buffer
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.engine.local_engine import DeviceThread
from polyxla_bridge.engine.stall_watchdog import STALLED
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.executable import ArrayType, Executable, unpack

TIMEOUT_S = 60
Printed = Callable[..., list[list[str]]]
Run = Callable[..., list[subprocess.CompletedProcess[str]]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "shards", "processes"),
    [
        ("data", "{(4, 1, 8, 8)} {(8, 144)}", 1),
        ("model", "{(16, 1, 8, 8)} {(2, 144)}", 1),
        ("both", "{(8, 1, 8, 8)} {(4, 144)}", 1),
        ("both", "{(8, 1, 8, 8)} {(4, 144)}", 2),
    ],
)
def test_training_computes_what_one_device_computes(
    printed: Printed, mesh: str, shards: str, processes: int
) -> None:
    found = printed("spmd_training.py", mesh, replicas=4, processes=processes)
    assert found == [["True True True True True", "True", shards]] * processes


@pytest.mark.slow
def test_arguments_may_be_packed_into_a_tuple(run: Run) -> None:
    """As torch_xla packs those of a program that has 3200."""
    packed = [{"XLA_PARAMETER_WRAPPING_THREADSHOLD": "1"}]
    (done,) = run("spmd_training.py", "data", replicas=4, environs=packed)
    lines = ["True True True True True", "True", "{(4, 1, 8, 8)} {(8, 144)}"]
    assert done.stdout.splitlines() == lines, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "shards", "processes"),
    [("fsdp", "{(12, 16)}", 1), ("fsdp+model", "{(24, 16)}", 1), ("fsdp", "{(12, 16)}", 2)],
)
def test_fsdp_computes_what_one_device_computes(
    printed: Printed, mesh: str, shards: str, processes: int
) -> None:
    found = printed("spmd_fsdp.py", mesh, replicas=4, processes=processes)
    assert found == [["True True True True", f"{shards} (48, 16)"]] * processes


@pytest.mark.slow
@pytest.mark.parametrize(
    "divided",
    [
        "batch",
        "batch on one axis",
        "batch, unevenly",
        "nothing",
        "height",
        "height on one axis",
        "batch and height",
        "batch and kernel",
    ],
)
def test_convolutions_and_pooling_compute_what_one_device_computes(printed: Printed, divided: str) -> None:
    assert printed("spmd_convolutions.py", divided, replicas=4) == [["True"]]


@pytest.mark.slow
def test_the_user_may_dump_programs(run: Run, tmp_path: Path) -> None:
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_module_re=nothing --xla_dump_compress_protos=true"
    (done,) = run("spmd_convolutions.py", "batch", replicas=4, environs=[{"XLA_FLAGS": flags}])
    assert done.stdout == "True\n", done.stderr


def test_tensors_under_spmd(printed: Printed) -> None:
    (lines,) = printed("spmd_tensors.py", replicas=4)
    assert lines == [
        "32.0 512.0",
        "32.0 16.0",
        "{replicated} 32.0",
        "[[0.0, 2.0, 4.0, 6.0], [8.0, 10.0, 12.0, 14.0], [16.0, 18.0, 20.0, 22.0], [24.0, 26.0, 28.0, 30.0]]",
        "[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]",
        "[1024, 1024, 1024, 1024]",
    ]


def test_a_model_of_torch_compile_under_spmd(printed: Printed) -> None:
    code = """
import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd.xla_sharding as xs
import torch_xla.runtime as xr
xr.use_spmd()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).eval()
records = torch.randn(8, 16)
with torch.no_grad():
    expected = model(records)
    compiled = torch.compile(model.to("xla"), backend="openxla")
    parts = records.to("xla")
    xs.mark_sharding(parts, xs.Mesh(np.arange(4), (4, 1), ("data", "model")), ("data", None))
    print([torch.allclose(compiled(parts).cpu(), expected, atol=1e-5) for _ in range(3)])
    print(torch_xla._XLAC._get_xla_sharding_spec(parts))
"""
    assert printed(code, replicas=4) == [["[True, True, True]", "{devices=[4,1]0,1,2,3}"]]


def test_spmd_after_a_tensor_exists_is_refused(run: Run) -> None:
    # torch_xla 2.9.0 gets a signal 11 at the next tensor, on its own devices, too.
    code = """
import torch
import torch_xla.runtime as xr
x = torch.ones(2).to("xla")
try:
    xr.use_spmd()
except RuntimeError as error:
    print(error)
print(xr.is_spmd(), (x + 1).sum().item())
"""
    (done,) = run(code, replicas=4)
    error, is_spmd = done.stdout.splitlines()
    assert error.startswith("torch_xla.runtime.use_spmd() was called after the first tensor was moved")
    assert (done.returncode, is_spmd) == (0, "False 4.0"), done.stderr


@pytest.mark.slow
def test_the_cache_keeps_partitioned_programs_apart(run: Run, tmp_path: Path) -> None:
    environs = [{"POLYXLA_COMPILE_CACHE": str(tmp_path)}]
    found = []
    for how in ("plain", "partitioned") * 2:
        (done,) = run("spmd_cached.py", how, replicas=4, environs=environs)
        assert (done.returncode, done.stderr) == (0, "")
        found.append(done.stdout.split())
    compiles = [int(words[1]) for words in found]
    assert [words[0] for words in found] == ["2.0"] * 4
    assert [words[2] for words in found] == ["0", "0", str(compiles[0]), str(compiles[1])]
    assert min(compiles[:2]) > 0
    assert compiles[2:] == [0, 0]


@pytest.mark.slow
def test_a_process_that_leaves_a_partitioned_program_is_a_stall(run: Run) -> None:
    code = """
import os
import sys
import numpy as np
import torch
import torch_xla.distributed.spmd.xla_sharding as xs
import torch_xla.runtime as xr
xr.use_spmd()
x = torch.arange(4.0).to("xla")
xs.mark_sharding(x, xs.Mesh(np.arange(4), (4,), ("all",)), ("all",))
print(x.sum().item())
if os.environ["POLYXLA_BRIDGE_PROCESS"] == "0":
    print((x + 1).sum().item())
"""
    environs = [{"POLYXLA_STALL_TIMEOUT_S": "4"}] * 2
    (waits, leaves) = run(code, replicas=4, processes=2, environs=environs)
    assert (waits.stdout, leaves.stdout) == ("6.0\n", "6.0\n"), (waits.stderr, leaves.stderr)
    assert waits.returncode == STALLED
    assert "a replica is stuck" in waits.stderr


PARTS = """HloModule parts, num_partitions=4
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
ENTRY main { x = f32[8] parameter(0), sharding={devices=[4]<=[4]}
  zero = f32[] constant(0)
  s = f32[] reduce(x, zero), dimensions={0}, to_apply=add, sharding={replicated}
  y = f32[8] multiply(x, x), sharding={devices=[4]<=[4]}
  ROOT t = (f32[], f32[8]) tuple(s, y), sharding={{replicated}, {devices=[4]<=[4]}} }"""


def options() -> bytes:
    options = xla_client.CompileOptions()
    options.num_partitions = 4
    options.executable_build_options.use_spmd_partitioning = True
    data: bytes = options.SerializeAsString()
    return data


@pytest.fixture
def engine(free_port: Callable[[], int]) -> Iterator[JaxEngine]:
    engine = JaxEngine(BridgeSettings(4, 1, 0, f"127.0.0.1:{free_port()}"))
    yield engine
    engine.close()


def parts(engine: JaxEngine) -> Executable:
    return engine.compile(hlo_module_from_text(PARTS).as_serialized_hlo_module_proto(), options())


def upload(engine: JaxEngine, start: float = 0) -> list[list[Buffer]]:
    """Return the arguments of each device: two numbers, which count through the devices."""
    rows = []
    for device in engine.devices:
        host = np.array([0, 1], np.float32) + start + 2 * device.index
        rows.append([engine.from_host(device, ArrayType("float32", (2,)), host.view(np.uint8).data)])
    return rows


def download(engine: JaxEngine, buffer: Buffer) -> list[float]:
    data = engine.to_host(buffer).result(TIMEOUT_S)
    found: list[float] = np.frombuffer(data, np.float32).tolist()
    return found


def test_a_partitioned_program_computes_on_all_devices(engine: JaxEngine) -> None:
    executable = parts(engine)
    assert (executable.num_replicas, executable.num_partitions) == (1, 4)
    assert executable.outputs == (ArrayType("float32", ()), ArrayType("float32", (2,)))
    assert executable.native["collectives"] == ("all-reduce",)
    results = engine.execute_partitioned(executable, upload(engine))
    assert [download(engine, total) for total, _ in results] == [[28]] * 4
    assert [download(engine, part) for _, part in results] == [[0, 1], [4, 9], [16, 25], [36, 49]]


def test_a_batch_norm_is_split_over_the_devices(engine: JaxEngine) -> None:
    text = """HloModule norm, num_partitions=4
    ENTRY main { x = f32[8,2] parameter(0), sharding={devices=[4,1]<=[4]}
      scale = f32[2] parameter(1), sharding={replicated} offset = f32[2] parameter(2), sharding={replicated}
      ROOT n = (f32[8,2], f32[2], f32[2]) batch-norm-training(x, scale, offset), epsilon=0, feature_index=1,
        sharding={{devices=[4,1]<=[4]}, {replicated}, {replicated}} }"""
    executable = engine.compile(hlo_module_from_text(text).as_serialized_hlo_module_proto(), options())
    # XLA's partitioner would gather the whole array on each device.
    assert executable.native["collectives"] == ("all-reduce",)
    assert executable.outputs[0] == ArrayType("float32", (2, 2))


def test_another_part_of_the_same_size_is_refused(engine: JaxEngine) -> None:
    executable, rows = parts(engine), upload(engine)
    host = np.ones(2, np.int32)
    rows[3] = [engine.from_host(engine.devices[3], ArrayType("int32", (2,)), host.view(np.uint8).data)]
    with pytest.raises(PjrtError, match=r"argument 0 of parts must be .*float32.*, not .*int32"):
        engine.execute_partitioned(executable, rows)


def test_an_argument_that_failed_on_one_device_fails_on_all(engine: JaxEngine) -> None:
    executable, rows = parts(engine), upload(engine)
    broken: Future[Any] = Future()
    broken.set_exception(PjrtError(Code.RESOURCE_EXHAUSTED, "no memory on device 2"))
    rows[2] = [Buffer(rows[2][0].type, engine.devices[2], broken)]
    for total, _ in engine.execute_partitioned(executable, rows):
        with pytest.raises(PjrtError, match="no memory on device 2"):
            download(engine, total)
    # The devices still work.
    results = engine.execute_partitioned(executable, upload(engine))
    assert [download(engine, total) for total, _ in results] == [[28]] * 4


def test_programs_of_several_threads_meet_in_one_order(
    engine: JaxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable, put = parts(engine), DeviceThread.put

    def put_later(thread: DeviceThread, done: Future[Any], task: Callable[[], Any]) -> None:
        # The other threads run meanwhile.
        time.sleep(0.001)
        put(thread, done, task)

    monkeypatch.setattr(DeviceThread, "put", put_later)
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda start: sum_of(engine, executable, start), range(40)))
    assert sums == [28.0 + 8 * start for start in range(40)]


def test_parts_may_be_unequal(engine: JaxEngine) -> None:
    text = PARTS.replace("f32[8]", "f32[6]")
    executable = engine.compile(hlo_module_from_text(text).as_serialized_hlo_module_proto(), options())
    for program in (executable, engine.deserialize(engine.serialize(executable))):
        results = engine.execute_partitioned(program, upload(engine))
        # Two of the eight numbers are padding.
        assert [download(engine, total) for total, _ in results] == [[15]] * 4
        assert [download(engine, part) for _, part in results][:3] == [[0, 1], [4, 9], [16, 25]]


def test_each_device_runs_the_program_of_a_replica(engine: JaxEngine) -> None:
    text = """HloModule layer, num_partitions=4, buffer_donor={ (0, {}) }
    ENTRY main { x = f32[32,16,16,16] parameter(0), sharding={devices=[4,1,1,1]<=[4]}
      w = f32[32,16,3,3] parameter(1), sharding={replicated}
      y = f32[32,32,14,14] convolution(x, w), window={size=3x3}, dim_labels=bf01_oi01->bf01
      gradient = f32[32,16,3,3] convolution(x, y), window={size=14x14}, dim_labels=fb01_io01->fb01,
        sharding={replicated}
      twice = f32[32,16,16,16] add(x, x), sharding={devices=[4,1,1,1]<=[4]}
      ROOT t = (f32[32,16,3,3], f32[32,16,16,16]) tuple(gradient, twice),
        sharding={{replicated}, {devices=[4,1,1,1]<=[4]}} }"""
    executable = engine.compile(hlo_module_from_text(text).as_serialized_hlo_module_proto(), options())
    assert hlo.called_targets(executable.optimized_hlo) == {"polyxla_convolution", "polyxla_all-reduce"}
    assert [output.dims for output in executable.outputs] == [(32, 16, 3, 3), (8, 16, 16, 16)]
    assert executable.meets == (("all-reduce (add) of float32[32,16,3,3]", ((0, 1, 2, 3),)),)
    # A part of the result takes the memory of a part of the argument.
    assert executable.native["donated"] == {0}


def test_arrays_that_are_padded_twice_have_both_paddings(engine: JaxEngine) -> None:
    text = """HloModule edges, num_partitions=4
    ENTRY main { x = f32[8] parameter(0), sharding={devices=[4]<=[4]}
      one = f32[] constant(1) two = f32[] constant(2)
      a = f32[16] pad(x, one), padding=4_4, sharding={devices=[4]<=[4]}
      b = f32[16] pad(x, two), padding=4_4, sharding={devices=[4]<=[4]}
      ROOT t = (f32[16], f32[16]) tuple(a, b), sharding={{devices=[4]<=[4]}, {devices=[4]<=[4]}} }"""
    executable = engine.compile(hlo_module_from_text(text).as_serialized_hlo_module_proto(), options())
    results = engine.execute_partitioned(executable, upload(engine))
    for number, padding in enumerate([1, 2]):
        whole = [value for row in results for value in download(engine, row[number])]
        assert whole == [*[padding] * 4, *range(8), *[padding] * 4]


def test_a_program_without_shardings_is_that_of_each_device(engine: JaxEngine) -> None:
    # As TorchTPU's: each device has images of its own.
    text = """HloModule each, num_partitions=4
    ENTRY main { x = f32[4,2,4,4] parameter(0) y = f32[4,2,2,2] parameter(1)
      ROOT w = f32[1,2,3,3] convolution(x, y), window={size=2x2}, dim_labels=fb01_io01->bf01,
        batch_group_count=2 }"""
    executable = engine.compile(hlo_module_from_text(text).as_serialized_hlo_module_proto(), options())
    rows = []
    for device in engine.devices:
        sizes = (4, 2, 4, 4), (4, 2, 2, 2)
        arrays = [np.full(dims, device.index + 1, np.float32) for dims in sizes]
        rows.append(
            [
                engine.from_host(
                    device, ArrayType("float32", array.shape), array.reshape(-1).view(np.uint8).data
                )
                for array in arrays
            ]
        )
    results = engine.execute_partitioned(executable, rows)
    assert [set(download(engine, gradient)) for (gradient,) in results] == [{16}, {64}, {144}, {256}]


SUMS = """HloModule sums, num_partitions=4
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
ENTRY main { x = f32[2] parameter(0), sharding={manual}
  ROOT r = f32[2] %s, to_apply=add, sharding={manual} }"""


@pytest.mark.parametrize(
    ("reduction", "sums"),
    [
        # A group of replicas, of which there is one, for each partition.
        ("all-reduce(x), replica_groups={{0}}", [1, 3, 5, 7]),
        # A group of replicas with all of their partitions.
        ("all-reduce(x), channel_id=1, replica_groups={{0}}", [16, 16, 16, 16]),
        (
            "all-reduce(x), channel_id=1, replica_groups={{0,2},{1,3}}, use_global_device_ids=true",
            [6, 10, 6, 10],
        ),
    ],
)
def test_collectives_of_replicas_and_of_partitions(
    engine: JaxEngine, reduction: str, sums: list[float]
) -> None:
    text = SUMS.replace("%s", reduction)
    executable = engine.compile(hlo_module_from_text(text).as_serialized_hlo_module_proto(), options())
    results = engine.execute_partitioned(executable, upload(engine))
    assert [download(engine, total)[1] for (total,) in results] == sums


def test_a_program_of_replicas_and_partitions_is_refused(engine: JaxEngine) -> None:
    two = xla_client.CompileOptions.ParseFromString(options())
    two.num_partitions = two.executable_build_options.num_partitions = 2
    data = hlo_module_from_text(PARTS).as_serialized_hlo_module_proto()
    with pytest.raises(PjrtError, match="parts has 2 replicas of 2 partitions; only one of the two may be"):
        engine.compile(data, two.SerializeAsString())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_tensors_with_unequal_parts(run: Run, processes: int) -> None:
    code = """
import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd.xla_sharding as xs
import torch_xla.runtime as xr
xr.use_spmd()
mesh = xs.Mesh(np.arange(4), (4,), ("all",))
x = torch.arange(6.0).to("xla")
xs.mark_sharding(x, mesh, ("all",))
y, z = x * 2, x.sum()
xs.mark_sharding(y, mesh, ("all",))
torch_xla.sync()
print(y.cpu().tolist(), z.item())
"""
    for done in run(code, replicas=4, processes=processes):
        assert done.stdout == "[0.0, 2.0, 4.0, 6.0, 8.0, 10.0] 15.0\n", done.stderr
        assert (done.returncode, done.stderr) == (0, "")


def sum_of(engine: JaxEngine, executable: Executable, start: int) -> float:
    results = engine.execute_partitioned(executable, upload(engine, start))
    return download(engine, results[0][0])[0]


def test_a_partitioned_program_can_be_serialised(engine: JaxEngine) -> None:
    original = parts(engine)
    back = engine.deserialize(engine.serialize(original))
    assert (back.num_partitions, back.outputs) == (4, original.outputs)
    results = engine.execute_partitioned(back, upload(engine))
    assert [download(engine, total) for total, _ in results] == [[28]] * 4
    with pytest.raises(PjrtError, match="parts was made for 4 devices, and this job has 1"):
        unpack(engine.serialize(original), 1, COMPILER)
