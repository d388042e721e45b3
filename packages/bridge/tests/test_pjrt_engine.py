"""`PjrtEngine` on XLA's CPU client as a plugin."""

from __future__ import annotations

import _ctypes
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from jaxlib import xla_client

from polyxla_bridge import LIBRARY, native, pjrt_plugin
from polyxla_bridge.abi import Code
from polyxla_bridge.engine.engine import Engine
from polyxla_bridge.engine.expansions import convolution, sums, torch_library
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.engine.shared_memory import SharedMemory
from polyxla_bridge.env import BridgeSettings, CacheOrigin, Coordinates
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.libtpu import client as libtpu
from polyxla_bridge.plugin_client import plugin
from polyxla_bridge.plugin_client.client import PluginClient
from polyxla_bridge.programs import hlo, rewrite, shared_collectives
from polyxla_bridge.programs.hlo_pb2 import CompileOptionsProto
from polyxla_testing.engine_conformance import (
    ADD,
    DECOMPOSING,
    DONATING,
    DOUBLING,
    OPTIONS,
    EngineConformance,
    MemoryLimitConformance,
    OpenEngine,
    OpenLimited,
    compiled,
    download,
    module,
    ones,
    options_for,
    upload,
)

Run = Callable[..., list[subprocess.CompletedProcess[str]]]
STATS = ("bytes_in_use", "peak_bytes_in_use", "num_allocs", "largest_alloc_size")

EVERY = f"""HloModule every, replica_count=2
{ADD}
ENTRY main {{ x = f32[4] parameter(0) ROOT r = f32[4] all-reduce(x), replica_groups={{}}, to_apply=add }}"""


@pytest.fixture
def open_engine(open_on_plugin: OpenEngine) -> OpenEngine:
    return open_on_plugin


@pytest.fixture
def open_limited(open_on_plugin: Callable[..., Engine]) -> OpenLimited:
    return lambda limit_bytes: open_on_plugin(1, limit_bytes)


class TestConformance(EngineConformance, MemoryLimitConformance):
    """Every engine passes these tests."""


def test_devices_are_described(open_engine: OpenEngine) -> None:
    engine = open_engine(2)
    assert (engine.platform, engine.process_index) == ("CPU", 0)
    assert [(device.index, device.is_local, device.kind, device.place) for device in engine.devices] == [
        (0, True, "cpu", None),
        (1, True, "cpu", None),
    ]


def test_a_program_for_some_of_its_devices_is_refused(open_engine: OpenEngine) -> None:
    with pytest.raises(PjrtError, match=r"for the devices \[0, 2\] is not supported on a plugin"):
        open_engine(4).compile(module(EVERY), options_for([0, 2]))


def test_steps_leave_no_buffer_behind(cpu_plugin: Path) -> None:
    engine = PjrtEngine(BridgeSettings(), cpu_plugin)
    donating, one = compiled(engine, DONATING), upload(engine, ones(1))
    value = upload(engine, ones(0))
    for _ in range(200):
        value, _ = engine.execute(donating, engine.devices[0], [value, one])
    assert download(engine, value).tolist() == [200] * 4
    assert engine.finish(60)
    del _
    assert engine.live_buffers == 2
    assert engine.memory_stats(engine.devices[0])["bytes_in_use"] == 2 * 16
    assert set(STATS) <= set(engine.memory_stats(engine.devices[0]))
    engine.close()


def test_buffers_that_outlive_the_engine_are_no_danger(cpu_plugin: Path) -> None:
    engine = PjrtEngine(BridgeSettings(), cpu_plugin)
    buffer = upload(engine, ones(1))
    doubling = compiled(engine, DOUBLING)
    engine.close()
    assert engine.live_buffers == 0
    with pytest.raises(PjrtError, match="was closed"):
        upload(engine, ones(1))
    with pytest.raises(PjrtError, match="was closed"):
        compiled(engine, DOUBLING.replace("doubling", "other"))
    # Their destructors run after the client's.
    del buffer, doubling


def test_a_device_reads_while_the_reads_of_others_wait_for_it(open_engine: OpenEngine) -> None:
    """An accelerator's programs start at once, and then wait for each other, as these do in shared memory."""
    engine = open_engine(2)
    target = "meeting_all-reduce"
    address = native.address("polyxla_all_reduce")
    assert isinstance(engine, PjrtEngine)
    assert address
    assert engine._client.plugin.register(target, address)
    square = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    summing = module(f"""HloModule summing, replica_count=2
{ADD}
ENTRY main {{ x = f32[64,64] parameter(0) y = f32[64,64] dot(x, x), {square}
  ROOT r = f32[64,64] all-reduce(y), replica_groups={{{{0,1}}}}, to_apply=add }}""")
    steps = " ".join(f"x{step + 1} = f32[900,900] dot(x{step}, x{step}), {square}" for step in range(5))
    body = f"x0 = f32[900,900] parameter(0) {steps} ROOT r = f32[900,900] copy(x5)"
    slow = compiled(engine, f"HloModule slow\nENTRY main {{ {body} }}")
    memory = SharedMemory(BridgeSettings(2))
    memory.join(memory.offer(), [0, 1])
    try:
        waiting = []
        for device in engine.devices:
            # Each program is for one device, whose number in it is 0.
            order = [device.index, 1 - device.index]
            code = shared_collectives.rewritten(summing, 2, order).replace(
                b"polyxla_all-reduce", target.encode()
            )
            one = engine.compile(code, options_for([device.index]))
            if device.index == 1:
                (own,) = engine.execute(slow, device, [upload(engine, np.zeros((900, 900), np.float32), 1)])
                assert not download(engine, own).any()
            given = upload(engine, np.ones((64, 64), np.float32), device.index)
            waiting += [engine.to_host(engine.execute(one, device, [given])[0]) for _ in range(4)]
        for read in waiting:
            assert set(np.frombuffer(read.result(60), np.float32)) == {128}
    finally:
        memory.leave()


def test_an_xla_flag_of_the_user_takes_precedence_also_from_a_file(cpu_plugin: Path, tmp_path: Path) -> None:
    flag = "--xla_cpu_enable_fast_min_max=true"
    file = tmp_path / "flags"
    file.write_text(flag)
    for text in ("", flag, str(file)):
        with closing(PjrtEngine(BridgeSettings(xla_flags=text), cpu_plugin)) as engine:
            options = CompileOptionsProto.FromString(compiled(engine, DOUBLING).native["program"].options)
            assert ("xla_cpu_enable_fast_min_max" in options.env_option_overrides) == (not text)


def test_a_refused_option_is_reported_in_the_plugins_words(cpu_plugin: Path) -> None:
    with pytest.raises(
        PjrtError, match=r"with the options \{'nonsense': 1\}: Unexpected option name .*nonsense"
    ):
        PjrtEngine(BridgeSettings(), cpu_plugin, {"nonsense": 1})


def test_another_number_of_devices_than_of_replicas_is_refused(cpu_plugin: Path) -> None:
    with pytest.raises(PjrtError, match=r"2 replicas .* and the plugin .* 3 devices") as refused:
        pjrt_plugin.make_engine(
            BridgeSettings(2, plugin=str(cpu_plugin), plugin_options={"cpu_device_count": 3}), None
        )
    assert refused.value.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("missing", "missing is no file"),
        (__file__, "cannot be used as a PJRT plugin"),
        (_ctypes.__file__, "undefined symbol: GetPjrtApi"),
        ("libtpu", "there is no package libtpu: pip install libtpu"),
        ("cuda", r"is not installed: pip install 'jax-cuda13-plugin\[with-cuda\]'"),
    ],
)
def test_a_library_that_is_no_plugin_is_refused(path: str, why: str) -> None:
    with pytest.raises(PjrtError, match=why):
        pjrt_plugin.make_engine(BridgeSettings(plugin=path), None)


def test_compiled_programs_are_cached_for_later_jobs(cpu_plugin: Path, tmp_path: Path) -> None:
    settings = BridgeSettings(cache_path=str(tmp_path), cache_origin=CacheOrigin.USER)
    found: list[bool] = []
    # Once each: jaxlib numbers the modules that a process parses.
    programs = [module(text) for text in (EVERY, DOUBLING)]
    for _ in range(2):
        engine = PjrtEngine(settings, cpu_plugin, {"cpu_device_count": 2}, found.append)
        summing, doubling = (engine.compile(program, OPTIONS) for program in programs)
        inputs = [upload(engine, ones(index + 1), index) for index in range(2)]
        results = [engine.execute(summing, device, [inputs[device.index]])[0] for device in engine.devices]
        assert [download(engine, result)[0] for result in results] == [3, 3]
        (twice,) = engine.execute(doubling, engine.devices[1], [upload(engine, np.float32(2), 1)])
        assert download(engine, twice) == 4
        engine.close()
    assert found == [False, False, True, True]


def test_a_compiled_program_is_for_one_model_of_device(cpu_plugin: Path, tmp_path: Path) -> None:
    settings = BridgeSettings(cache_path=str(tmp_path), cache_origin=CacheOrigin.USER)
    found: list[bool] = []
    program, kept = module(DOUBLING), b""
    for kind in ("one model", "another model", "one model"):
        client = PluginClient(plugin.load(cpu_plugin), {})
        client.devices = tuple(replace(device, kind=kind) for device in client.devices)
        with closing(PjrtEngine(settings, client, on_lookup=found.append)) as engine:
            executable = engine.compile(program, OPTIONS)
            if kind == "another model":
                with pytest.raises(PjrtError, match=r"for one model, and this is .* for another model"):
                    engine.deserialize(kept)
            kept = kept or engine.serialize(executable)
            assert engine.deserialize(engine.serialize(executable)).name == "doubling"
    assert found == [False, False, True]


def test_programs_with_other_collectives_end_with_an_error_on_all_replicas(open_engine: OpenEngine) -> None:
    engine = open_engine(2)
    program = f"""HloModule NAME, replica_count=2
        {ADD}
        ENTRY main {{ x = f32[4] parameter(0) y = f32[4] OPERATION(x), replica_groups={{}}MORE
          ROOT r = f32[4] negate(y) }}"""
    summing = compiled(engine, program.replace("OPERATION", "all-reduce").replace("MORE", ", to_apply=add"))
    turning = compiled(
        engine,
        program.replace("OPERATION", "collective-permute")
        .replace("replica_groups={}", "source_target_pairs={{0,1},{1,0}}")
        .replace("MORE", ""),
    )
    results = [
        engine.execute(program, device, [upload(engine, ones(1), device.index)])[0]
        for program, device in zip((summing, turning), engine.devices, strict=True)
    ]
    for result in results:
        with pytest.raises(
            PjrtError, match=r"replica 0 calls all-reduce \(add\) .* replica 1 collective-permute "
        ):
            download(engine, result)
    # Both devices still work.
    results = [
        engine.execute(summing, device, [upload(engine, ones(1), device.index)])[0]
        for device in engine.devices
    ]
    assert [download(engine, result)[0] for result in results] == [-2, -2]


def test_an_argument_that_fails_on_one_replica_fails_on_all(open_engine: OpenEngine) -> None:
    engine = open_engine(2)
    every = compiled(engine, EVERY)
    bad = upload(engine, ones(1))
    engine.delete(bad)
    results = [engine.execute(every, engine.devices[0], [bad])[0]]
    results += engine.execute(every, engine.devices[1], [upload(engine, ones(1), 1)])
    for result in results:
        with pytest.raises(PjrtError, match="was deleted"):
            download(engine, result)


def test_a_closed_engine_leaves_no_threads(cpu_plugin: Path) -> None:
    before = set(threading.enumerate())
    engine = PjrtEngine(BridgeSettings(), cpu_plugin, {"cpu_device_count": 2})
    download(engine, upload(engine, ones(1)))
    engine.close()
    assert {thread for thread in threading.enumerate() if thread.is_alive()} <= before


@pytest.mark.slow
def test_torch_xla_trains_on_a_plugin(run: Run, on_plugin: Callable[[int], dict[str, str]]) -> None:
    (done,) = run("training.py", environs=[on_plugin(1)])
    assert (done.stdout, done.stderr) == ("True True\n", "")


@pytest.mark.slow
def test_torch_xlas_device_cuda_is_a_plugins(run: Run, on_plugin: Callable[[int], dict[str, str]]) -> None:
    (done,) = run("training.py", environs=[on_plugin(1) | {"PJRT_DEVICE": "CUDA"}])
    assert (done.stdout, done.stderr) == ("True True\n", "")
    (without,) = run("training.py", environs=[{"PJRT_DEVICE": "CUDA"}])
    assert "XLA's plugin for NVIDIA GPUs is not installed: pip install 'jax-cuda13-plugin" in without.stderr


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, pytest.param(8, marks=pytest.mark.long)])
def test_every_collective_of_torch_xla_works_on_a_plugin(
    run: Run, on_plugin: Callable[[int], dict[str, str]], replicas: int
) -> None:
    (done,) = run("collectives.py", replicas=replicas, environs=[on_plugin(replicas)])
    assert done.stdout == "right\n" * replicas, done.stderr


POOLING = """
import torch
import torch_xla
images = torch.rand(2, 3, 9, 9)
results = []
for device in ("xla", "cpu"):
    x = images.to(device).requires_grad_()
    y = torch.nn.functional.max_pool2d(x, 3, 2)
    (y * y).sum().backward()
    results.append((y.detach().cpu(), x.grad.cpu()))
print([torch.equal(tensor, other) for tensor, other in zip(*results)])
"""


def test_instructions_that_jax_writes_keep_their_dtypes(
    run: Run, on_plugin: Callable[[int], dict[str, str]]
) -> None:
    (done,) = run(POOLING, environs=[on_plugin(1)])
    assert (done.stdout, done.stderr) == ("[True, True]\n", "")


BEHIND_LIBTPU = {
    "PJRT_DEVICE": "TPU",
    "TPU_LIBRARY_PATH": str(LIBRARY),
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_VISIBLE_CHIPS": "0",
    "CLOUD_TPU_TASK_ID": "0",
}


@pytest.mark.slow
def test_the_bridge_stands_between_torch_xla_and_the_plugin_of_a_tpu(
    run: Run, on_plugin: Callable[[int], dict[str, str]]
) -> None:
    (done,) = run("training.py", environs=[BEHIND_LIBTPU | on_plugin(1)])
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.slow
def test_a_plugins_device_emulates_a_chip(run: Run, on_plugin: Callable[[int], dict[str, str]]) -> None:
    environ = BEHIND_LIBTPU | on_plugin(1) | {"POLYXLA_LIBTPU_HOST": "v4:2x2x1"}
    (done,) = run("training.py", environs=[environ])
    assert done.stdout == "True True\n", done.stderr


def emulating(chips: int) -> BridgeSettings:
    places = tuple(Coordinates(chip, 0, 0, 0) for chip in reversed(range(chips)))
    return BridgeSettings(chips, platform="TPU", kind="TPU v5 lite", places=places)


def test_emulated_chips_have_their_names_and_places(cpu_plugin: Path) -> None:
    engine = PjrtEngine(emulating(2), cpu_plugin, {"cpu_device_count": 2})
    assert engine.platform == "TPU"
    assert [(device.index, device.kind, device.place) for device in engine.devices] == [
        (0, "TPU v5 lite", Coordinates(0, 0, 0, 0)),
        (1, "TPU v5 lite", Coordinates(1, 0, 0, 0)),
    ]
    engine.close()


def test_options_of_a_tpus_compiler_do_not_reach_another(cpu_plugin: Path) -> None:
    chosen = xla_client.CompileOptions()
    chosen.env_option_overrides = [("xla_tpu_enable_something", "true")]
    for settings, is_refused in ((BridgeSettings(), True), (emulating(1), False)):
        engine = PjrtEngine(settings, cpu_plugin, {"cpu_device_count": 1})
        try:
            compile_ = partial(engine.compile, module(DOUBLING), chosen.SerializeAsString())
            if is_refused:
                with pytest.raises(PjrtError, match="xla_tpu_enable_something"):
                    compile_()
            else:
                (four,) = engine.execute(compile_(), engine.devices[0], [upload(engine, np.float32(2))])
                assert download(engine, four) == 4
        finally:
            engine.close()


CONVOLVING = """HloModule convolving
ENTRY main { x = f32[8,16,32,32] parameter(0) w = f32[32,16,3,3] parameter(1)
  ROOT y = f32[8,32,30,30] convolution(x, w), window={size=3x3}, dim_labels=bf01_oi01->bf01 }"""
SUMMING = f"""HloModule summing
{ADD}
ENTRY main {{ x = f32[16384,32] parameter(0) zero = f32[] constant(0)
  ROOT y = f32[32] reduce(x, zero), dimensions={{0}}, to_apply=add }}"""


@pytest.mark.parametrize(
    ("text", "shapes", "target"),
    [
        (CONVOLVING, [(8, 16, 32, 32), (32, 16, 3, 3)], convolution.TARGET),
        (SUMMING, [(16384, 32)], sums.TARGET),
    ],
)
def test_programs_call_the_library_and_are_stored(
    text: str, shapes: list[tuple[int, ...]], target: str, open_engine: OpenEngine
) -> None:
    engine, generator = open_engine(1), np.random.default_rng(0)
    hosts = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]
    executable = compiled(engine, text)
    loaded = engine.deserialize(engine.serialize(executable))
    found = []
    for program in (executable, loaded):
        assert hlo.called_targets(program.optimized_hlo) == {target}
        (result,) = engine.execute(program, engine.devices[0], [upload(engine, host) for host in hosts])
        found.append(download(engine, result))
    np.testing.assert_array_equal(*found)
    jax_engine = JaxEngine(BridgeSettings(has_torch_kernels=False))
    try:
        arrays = [upload(jax_engine, host) for host in hosts]
        (result,) = jax_engine.execute(compiled(jax_engine, text), jax_engine.devices[0], arrays)
        np.testing.assert_allclose(found[0], download(jax_engine, result), rtol=1e-4, atol=1e-3)
    finally:
        jax_engine.close()


def test_a_program_for_torchs_library_is_not_loaded_without_it(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(1)
    stored = engine.serialize(compiled(engine, CONVOLVING))
    monkeypatch.setattr(torch_library, "is_open", lambda: False)
    with pytest.raises(PjrtError, match="calls torch's library, and this process cannot open it"):
        engine.deserialize(stored)


@pytest.mark.parametrize(
    "lacking",
    [("polyxla_bridge.abi.EXTENSION_TYPE_FFI", -1), ("polyxla_bridge.plugin_client.plugin.FFI_MINOR", 1000)],
)
def test_a_plugin_that_knows_no_such_functions_computes_without_them(
    lacking: tuple[str, int], open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Older versions of XLA lack this option.
    monkeypatch.setattr(rewrite, "FUSION_OPTION", "xla_no_such_option")
    monkeypatch.setattr(*lacking)
    engine = open_engine(1)
    executable = compiled(engine, SUMMING)
    assert not hlo.called_targets(executable.optimized_hlo)
    array = upload(engine, np.ones((16384, 32), np.float32))
    (result,) = engine.execute(executable, engine.devices[0], [array])
    assert download(engine, result).tolist() == [16384] * 32


def test_a_function_that_the_plugin_refuses_is_reported(
    cpu_plugin: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert not plugin.load(cpu_plugin).register("polyxla_nothing", 0)
    assert "cannot call polyxla_nothing: FFI handler cannot be null" in caplog.text


def test_a_platform_that_is_no_tpu_gets_no_instructions_of_a_tpu(cpu_plugin: Path) -> None:
    # XLA's CPU client is treated here as a GPU's, which has no such instructions either.
    client = PluginClient(plugin.load(cpu_plugin), {"cpu_device_count": 1})
    client.platform = "cuda"
    engine = PjrtEngine(emulating(1), client.share(1))
    identity = upload(engine, np.eye(2, dtype=np.float32))
    factors, *_ = engine.execute(compiled(engine, DECOMPOSING), engine.devices[0], [identity])
    assert download(engine, factors).tolist() == [[1, 0], [0, 1]]
    engine.close()
    client.close()


def test_a_tpus_kernel_is_refused_where_its_chip_is_emulated(cpu_plugin: Path) -> None:
    engine = PjrtEngine(emulating(1), cpu_plugin, {"cpu_device_count": 1})
    kernel = 'custom-call(x), custom_call_target="tpu_custom_call"'
    with pytest.raises(PjrtError, match=r"a kernel for TPU cores.* cannot run where a TPU is emulated"):
        compiled(engine, DOUBLING.replace("add(x, x)", kernel))
    engine.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (emulating(2), r"2 devices of the emulated TPU, and the plugin .* 1 devices: .*visible_devices"),
        (replace(emulating(2), processes=2, coordinator="127.0.0.1:1"), "belong to 2 processes: emulate one"),
        (replace(emulating(1), programs_path="/programs"), "programs are not recorded on the devices of"),
    ],
)
def test_a_tpu_that_a_plugin_cannot_emulate_is_refused(
    cpu_plugin: Path, settings: BridgeSettings, why: str
) -> None:
    on_one = replace(settings, plugin=str(cpu_plugin), plugin_options={"cpu_device_count": 1})
    with pytest.raises(PjrtError, match=why) as refused:
        libtpu.on_plugin(on_one, None)
    assert refused.value.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize("package", ["xla_cuda12", "xla_cuda13"])
def test_cuda_stands_for_the_installed_plugin(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "jax_plugins" / package / "xla_cuda_plugin.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    assert pjrt_plugin.library_path("cuda") == library


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"visible_devices": [0, 1]}),
        (
            {"visible_devices": [2, 3], "preallocate": False},
            {"visible_devices": [2, 3], "preallocate": False},
        ),
    ],
)
def test_an_emulated_chip_is_a_gpu_unless_others_are_chosen(
    given: dict[str, object], options: dict[str, object]
) -> None:
    assert pjrt_plugin.client_options(replace(emulating(2), plugin="cuda", plugin_options=given)) == options
    assert pjrt_plugin.client_options(replace(emulating(2), plugin="other", plugin_options=given)) == given


def test_several_processes_are_refused(cpu_plugin: Path) -> None:
    settings = BridgeSettings(2, 2, 0, "127.0.0.1:1", plugin=str(cpu_plugin))
    with pytest.raises(PjrtError, match="one process drives the devices"):
        pjrt_plugin.make_engine(settings, None)
