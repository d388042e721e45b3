"""Workers whose cores are a plugin's devices: XLA's CPU client as a plugin, and an emulated TPU."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla import UsageError
from polyxla.plugin import snapshot, temporary_environ
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType
from polyxla_xrt.client.engine import RemoteEngine
from polyxla_xrt.client.lease import Lease, Pod
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.errors import WorkerError
from polyxla_xrt.server.worker.platforms import tpu_host
from polyxla_xrt.server.worker.platforms.choice import choose_platform
from polyxla_xrt.server.worker.platforms.library import Library
from polyxla_xrt.server.worker.platforms.plugin import PluginEngines

SECRET = "of one job"

Start = Callable[..., Any]
TIMEOUT_S = 60.0
OPTIONS = xla_client.CompileOptions().SerializeAsString()
SUM = """HloModule meet, replica_count=CORES
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
ENTRY main { x = f32[] parameter(0) ROOT r = f32[] all-reduce(x), replica_groups={}, to_apply=add }
"""
GROWTH = 1.03
"""As in `test_worker_jobs`."""
WINDOW = 5
UNUSED = 1 << 20


def cpu_plugin() -> Path:
    package = pytest.importorskip("lammps_jax_pjrt_cpu", reason="has wheels for x86_64 only")
    return Path(package.PLUGIN_PATH)


def on_plugin(devices: int) -> tuple[str, ...]:
    return ("--platform", f"plugin={cpu_plugin()}", "--plugin-option", f"cpu_device_count={devices}")


def start_on(start: Start, platform: str, *options: str, **variables: str) -> Any:
    """Start a worker of two cores on the plugin, or on an emulated TPU of the type `platform`."""
    if platform == "plugin":
        options = (*on_plugin(2), *options)
    else:
        options = ("--platform", "tpu", *options)
        variables["POLYXLA_EMULATE"] = platform
    with temporary_environ({**os.environ, **variables}):
        return start(*options)


@pytest.fixture(scope="module", params=["cpu (plugin)", "tpu"], ids=["plugin", "tpu"])
def platform_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def platform_worker(platform_name: str, share_worker: Start) -> Any:
    """A worker of two cores: of the plugin, which has three, or of an emulated TPU's only chip."""
    if platform_name != "tpu":
        return share_worker(*on_plugin(3))
    with temporary_environ({**os.environ, "POLYXLA_EMULATE": "v7x-2"}):
        return share_worker("--platform", "tpu")


def job_of_two(worker: Any, client: Start) -> tuple[Any, list[Any]]:
    lease = client("lease", worker.address, "30")
    while isinstance(key := lease.read(), str) and key.startswith("waiting"):
        pass
    assert isinstance(key, str), key
    sessions = [client("session", worker.address, key, str(ordinal)) for ordinal in range(2)]
    assert [session.read() for session in sessions] == ["attached", "attached"]
    return lease, sessions


def serves_a_job(worker: Any, client: Start) -> None:
    lease, sessions = job_of_two(worker, client)
    assert [session.order("double") for session in sessions] == [42.0, 42.0]
    assert [session.order("leave") for session in sessions] == ["left", "left"]
    assert lease.order("close") == "closed"
    worker.wait_until_free()


def compute(address: str, job: str, core: int, cores: int) -> float:
    """Add the cores' numbers in a collective; leave an array behind."""
    engine = RemoteEngine(Assignment(address, job, (core,), "TPU", core, cores, core, cores), snapshot())
    device = engine.devices[core]
    argument = engine.from_host(device, ArrayType("float32", ()), memoryview(struct.pack("<f", core + 1)))
    unused = engine.from_host(device, ArrayType("uint8", (UNUSED,)), memoryview(bytes(UNUSED)))
    module = hlo_module_from_text(SUM.replace("CORES", str(cores))).as_serialized_hlo_module_proto()
    (result,) = engine.execute(engine.compile(module, OPTIONS), device, [argument])
    (value,) = struct.unpack("<f", engine.to_host(result).result(TIMEOUT_S))
    assert not unused.is_deleted
    engine.close()
    return float(value)


def sums(worker: Any, pool: ThreadPoolExecutor, cores: int = 2) -> list[float]:
    with closing(Lease(worker.address, cores, snapshot(), wait_s=TIMEOUT_S)) as lease:
        parts = [pool.submit(compute, worker.address, lease.job, core, cores) for core in range(cores)]
        found = [part.result(TIMEOUT_S) for part in parts]
    worker.wait_until_free()
    return found


def test_the_status_names_the_platform(platform_worker: Any, platform_name: str) -> None:
    status = platform_worker.status()
    assert (status["platform"], status["cores"]) == (platform_name, 2)


def test_jobs_compute_one_after_the_other_in_the_same_process(platform_worker: Any, client: Start) -> None:
    serving = platform_worker.serving_pid
    for _ in range(2):
        serves_a_job(platform_worker, client)
    assert platform_worker.serving_pid == serving


def test_replicas_meet_in_collectives(platform_worker: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert sums(platform_worker, pool) == [3.0, 3.0]


def test_a_job_may_have_fewer_cores(platform_worker: Any) -> None:
    with closing(Lease(platform_worker.address, 1, snapshot(), wait_s=TIMEOUT_S)) as lease:
        engine = RemoteEngine(Assignment(platform_worker.address, lease.job, (0,), "TPU", 0, 1, 0, 1), {})
        argument = engine.from_host(engine.devices[0], ArrayType("float32", ()), memoryview(bytes(4)))
        double = "HloModule double ENTRY main { x = f32[] parameter(0) ROOT y = f32[] add(x, x) }"
        program = engine.compile(hlo_module_from_text(double).as_serialized_hlo_module_proto(), OPTIONS)
        (result,) = engine.execute(program, engine.devices[0], [argument])
        assert bytes(engine.to_host(result).result(TIMEOUT_S)) == bytes(4)
        engine.close()
    platform_worker.wait_until_free()


@pytest.mark.slow
def test_a_wedged_device_is_replaced_with_its_process(platform_worker: Any, client: Start) -> None:
    serving = platform_worker.serving_pid
    lease, sessions = job_of_two(platform_worker, client)
    assert sessions[0].order("stall") == "sent"
    time.sleep(0.5)
    sessions[1].kill()
    for connected in (sessions[0], lease):
        assert "ordinal 1 died" in connected.order("wait")
    platform_worker.wait_until_replaced(serving)
    serves_a_job(platform_worker, client)
    assert "replacing this process" in platform_worker.log


def test_a_device_that_is_taken_during_a_replacement_is_awaited(start_worker: Start, client: Start) -> None:
    with temporary_environ({**os.environ, "POLYXLA_EMULATE": "v7x-2", "POLYXLA_LIBTPU_DEV": "taken"}):
        worker = start_worker("--platform", "tpu")
    os.kill(worker.serving_pid, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S
    with socket.socket(socket.AF_UNIX) as chip:
        # The chip is free once the process is dead; its successor imports jax before it takes the chip.
        while True:
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError):
                chip.bind("\0polyxla-libtpu/taken/accel0")
                break
        while "The TPU is already in use" not in worker.log:
            assert time.monotonic() < deadline, worker.log
            time.sleep(0.1)
    serves_a_job(worker, client)
    assert "the cores cannot be opened again yet" in worker.log


@pytest.mark.parametrize("platform", ["plugin", "v7x-2"])
def test_the_memory_of_a_workers_devices_is_limited(start_worker: Start, platform: str) -> None:
    worker = start_on(start_worker, platform, POLYXLA_DEVICE_MEMORY="4MiB")
    with closing(Lease(worker.address, 1, snapshot(), wait_s=TIMEOUT_S)) as lease:
        engine = RemoteEngine(Assignment(worker.address, lease.job, (0,), "TPU", 0, 1, 0, 1), {})
        size = 3 << 20
        type_, zeros = ArrayType("uint8", (size,)), memoryview(bytes(size))
        first, second = (engine.from_host(engine.devices[0], type_, zeros) for _ in range(2))
        assert engine.to_host(first).result(TIMEOUT_S).nbytes == size
        limit = r"needs 3,145,728 bytes of memory, but of the device's 4,194,304 bytes 3,145,728 are in use"
        with pytest.raises(PjrtError, match=limit):
            engine.to_host(second).result(TIMEOUT_S)
        assert engine.memory_stats(engine.devices[0])["bytes_limit"] == 4 << 20
        engine.close()


def test_a_job_of_several_workers_is_refused(platform_worker: Any) -> None:
    with pytest.raises(WorkerError, match="a job of 2 workers needs CPU workers"):
        Lease(platform_worker.address, 2, snapshot(), pod=Pod(2, 0, "127.0.0.1", SECRET))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "cores", "jobs"),
    [
        ("plugin", 2, 20),
        *(
            pytest.param(platform, cores, 200, marks=pytest.mark.long)
            for platform, cores in (("plugin", 2), ("v7x-2", 2), ("v3-8", 8))
        ),
    ],
)
@pytest.mark.timeout(900)
def test_jobs_leave_no_memory_behind(start_worker: Start, platform: str, cores: int, jobs: int) -> None:
    worker = start_on(start_worker, platform, "--devices", str(cores))
    resident = []
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(jobs):
            assert sums(worker, pool, cores) == [cores * (cores + 1) / 2] * cores
            resident.append(worker.resident_bytes)
    warm, last = median(resident[jobs // 2 - WINDOW : jobs // 2]), median(resident[-WINDOW:])
    assert last < GROWTH * warm, [size >> 20 for size in resident]


def refusal(*options: str, variables: dict[str, str] | None = None) -> str:
    """Return the error of a worker that does not start."""
    command = [sys.executable, "-m", "polyxla", "worker", "--address", "127.0.0.1:0", *options]
    environ = {**os.environ, **(variables or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environ
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_more_devices_than_the_plugin_has_are_refused() -> None:
    assert "has 2 devices here, not 3 (from --devices 3). Pass --devices 2" in refusal(
        *on_plugin(2), "--devices", "3"
    )


def test_the_plugins_own_error_is_printed() -> None:
    error = refusal("--platform", f"plugin={cpu_plugin()}", "--plugin-option", "nonsense=1")
    assert "Unexpected option name passed to PJRT_Client_Create: nonsense (from --platform plugin=" in error


def test_chips_that_another_process_has_are_refused(share_worker: Start) -> None:
    emulated = {"POLYXLA_EMULATE": "v7x-2", "POLYXLA_LIBTPU_DEV": "held"}
    with temporary_environ({**os.environ, **emulated}):
        holder = share_worker("--platform", "tpu")
    error = refusal("--platform", "tpu", variables=emulated)
    assert f"The TPU is already in use by process with pid {holder.serving_pid}" in error


def test_a_plugin_that_hangs_is_given_up(tmp_path: Path) -> None:
    source, library = tmp_path / "hang.c", tmp_path / "hang.so"
    source.write_text("#include <unistd.h>\nvoid *GetPjrtApi(void) { sleep(600); return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    with pytest.raises(UsageError, match=r"has not made its client within 0\.2 s \(from --platform x\)"):
        PluginEngines(Library(library, "--platform x"), None, {}, open_s=0.2)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("gpu", [], "'gpu' is not a platform"),
        ("cpu=x", [], "'cpu=x' is not a platform"),
        ("plugin", [], "'plugin' is not a platform"),
        ("plugin=/no/such.so", [], "there is no file /no/such.so"),
        ("cuda=x", [], "'cuda=x' is not a platform"),
        ("cuda", [], "NVIDIA GPUs is not installed (from --platform cuda). Install it: pip install 'jax-"),
        ("cpu", ["a=1"], "the CPU platform has no options"),
        ("cpu", ["a"], "'a' is not NAME=VALUE"),
        ("tpu", [], "no TPU chip is attached to this machine (from --platform tpu)"),
    ],
)
def test_invalid_platforms_are_refused(text: str, options: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        choose_platform(text, options, {})
    assert message in str(error.value)


def test_the_plugins_options_have_types(tmp_path: Path) -> None:
    (tmp_path / "plugin.so").touch()
    given = ["count=8", "on=true", "off=false", "part=0.5", "name=a=b"]
    library = choose_platform(f"plugin={tmp_path / 'plugin.so'}", given, {})
    assert library is not None
    assert library.options == {"count": 8, "on": True, "off": False, "part": 0.5, "name": "a=b"}


def test_libtpu_gets_the_whole_host_and_the_users_flags() -> None:
    given = {
        "POLYXLA_EMULATE": "v4-16",
        "TPU_VISIBLE_CHIPS": "0",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "LIBTPU_INIT_ARGS": "--xla_mine=1",
    }
    library = tpu_host.find_library({}, given)
    variables = library.variables
    assert variables["TPU_PROCESS_BOUNDS"] == "1,1,1"
    assert variables["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"
    assert variables["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
    assert variables["CLOUD_TPU_TASK_ID"] == "0"
    assert variables["LIBTPU_INIT_ARGS"] == "--xla_mine=1 --xla_tpu_use_enhanced_launch_barrier=false"
    assert str(library.path) == variables["TPU_LIBRARY_PATH"]


def test_the_users_own_choice_of_the_barrier_stays() -> None:
    flags = "--xla_tpu_use_enhanced_launch_barrier=true"
    library = tpu_host.find_library({}, {"POLYXLA_EMULATE": "v4-8", "LIBTPU_INIT_ARGS": flags})
    assert library.variables["LIBTPU_INIT_ARGS"] == flags


def test_serving_a_plugin_does_not_import_jax() -> None:
    check = (
        "import sys, polyxla_xrt.server.worker.supervisor, polyxla_xrt.server.worker.platforms.tpu_host\n"
        "sys.exit('jax' in sys.modules or 'jaxlib' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], timeout=TIMEOUT_S, check=True)
