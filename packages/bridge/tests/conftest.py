"""Fixtures that run programs in processes of their own: with torch_xla, or with an engine alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyxla.plugin import free_ports
from polyxla_bridge.engine.engine import Engine
from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.env import BridgeSettings

# Tests count compilations, which must not depend on the user's cache.
os.environ["POLYXLA_COMPILE_CACHE"] = "off"

TIMEOUT_S = 200
PROGRAMS = Path(__file__).with_name("programs")
Processes = list[subprocess.CompletedProcess[str]]


def environ_of(process: int, processes: int, replicas: int, port: int) -> dict[str, str]:
    return {
        "POLYXLA_BRIDGE_REPLICAS": str(replicas),
        "POLYXLA_BRIDGE_PROCESSES": str(processes),
        "POLYXLA_BRIDGE_PROCESS": str(process),
        "POLYXLA_BRIDGE_COORDINATOR": f"127.0.0.1:{port}",
        "POLYXLA_SECRET": "of one job",
        # XLA's pools must hold the waiting collectives of all replicas at once.
        "NPROC": str(max(2, 4 * replicas // processes)),
    }


@pytest.fixture
def computed() -> Callable[[bytes, list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]:
    """Return a function that computes a program of one replica on jaxlib's CPU client."""
    # Most tests need no jax.
    import jax
    from jaxlib import _jax, xla_client

    from polyxla_bridge.engine import custom_calls

    for target in custom_calls.TARGETS:
        custom_calls.register(target)

    def computed(data: bytes, arguments: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        (device,) = jax.devices("cpu")[:1]
        module, devices = _jax.mlir.hlo_to_stablehlo(data), _jax.DeviceList((device,))
        loaded = device.client.compile_and_load(module, devices, xla_client.CompileOptions())
        results = loaded.execute_sharded([jax.device_put(argument) for argument in arguments])
        return [np.asarray(parts[0]) for parts in results.disassemble_into_single_device_arrays()]

    return computed


@pytest.fixture(scope="session")
def cpu_plugin() -> Path:
    """The library of XLA's CPU client as a PJRT plugin."""
    package = pytest.importorskip("lammps_jax_pjrt_cpu", reason="has wheels for x86_64 only")
    return Path(package.PLUGIN_PATH)


@pytest.fixture
def open_on_plugin(cpu_plugin: Path) -> Iterator[Callable[..., Engine]]:
    """Return a function that opens an engine on the plugin.

    Its arguments are the number of devices, and the limit of their memory in bytes; without it, none.
    """
    engines: list[PjrtEngine] = []

    def open_on_plugin(count: int, limit_bytes: int = 0) -> PjrtEngine:
        settings = BridgeSettings(memory_bytes=limit_bytes, is_memory_limited=limit_bytes > 0)
        engines.append(PjrtEngine(settings, cpu_plugin, {"cpu_device_count": count}))
        return engines[-1]

    yield open_on_plugin
    for engine in engines:
        engine.close()
        assert engine.live_buffers == 0


@pytest.fixture
def on_plugin(cpu_plugin: Path) -> Callable[[int], dict[str, str]]:
    """Return a function that returns the variables of a process on the plugin with a number of devices."""

    def on_plugin(devices: int) -> dict[str, str]:
        options = json.dumps({"cpu_device_count": devices})
        return {"POLYXLA_PJRT_PLUGIN": str(cpu_plugin), "POLYXLA_PJRT_OPTIONS": options}

    return on_plugin


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Return a function that finds a free port."""
    return lambda: free_ports(1)[0]


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS / "torch_xla_server.py")],
        env={**os.environ, "PJRT_DEVICE": "CPU_POLYXLA"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            yield server
        finally:
            server.kill()


@pytest.fixture
def run(server: subprocess.Popen[str], tmp_path: Path) -> Callable[..., Processes]:
    """Return a function that runs a program of programs/torch_xla in each process of a job.

    A program of a few lines may be given as code instead of a file name. `environs` are more variables for
    each process.
    """

    def run(
        program: str,
        *arguments: str,
        replicas: int = 1,
        processes: int = 1,
        environs: Sequence[Mapping[str, str]] = (),
    ) -> Processes:
        is_file = program.endswith(".py")
        path = PROGRAMS / "torch_xla" / program
        (port,) = free_ports(1)
        outputs = [(tmp_path / f"out-{i}", tmp_path / f"err-{i}") for i in range(processes)]
        programs = []
        for process in range(processes):
            environ = environ_of(process, processes, replicas, port)
            environ |= environs[process] if environs else {}
            programs.append(
                {
                    "code": path.read_text() if is_file else program,
                    "command": [str(path) if is_file else "-c", *arguments],
                    "environ": {**environ, "XLA_THREAD_POOL_SIZE": environ["NPROC"]},
                    "files": [os.devnull, *map(str, outputs[process])],
                }
            )
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({"programs": programs, "timeout_s": TIMEOUT_S}) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        done = [
            subprocess.CompletedProcess(program, returned, out.read_text(), err.read_text())
            for returned, (out, err) in zip(codes, outputs, strict=True)
        ]
        for path in [path for pair in outputs for path in pair]:
            path.unlink()
        return done

    return run


@pytest.fixture
def printed(run: Callable[..., Processes]) -> Callable[..., list[list[str]]]:
    """Return a function that runs a program like `run`, and returns the lines that each process printed."""

    def printed(program: str, *arguments: str, replicas: int = 1, processes: int = 1) -> list[list[str]]:
        done = run(program, *arguments, replicas=replicas, processes=processes)
        assert [process.returncode for process in done] == [0] * processes, [
            process.stderr[-3000:] for process in done
        ]
        # Neither a traceback nor a warning.
        assert [process.stderr for process in done] == [""] * processes
        return [process.stdout.splitlines() for process in done]

    return printed


@pytest.fixture
def started() -> Callable[..., AbstractContextManager[list[subprocess.Popen[str]]]]:
    """Return a context manager that starts a function of a program in each process of a job."""

    @contextmanager
    def started(
        program: str, *arguments: str, replicas: int, processes: int, **environ: str
    ) -> Iterator[list[subprocess.Popen[str]]]:
        (port,) = free_ports(1)
        with tempfile.TemporaryDirectory() as flags:
            running = [
                subprocess.Popen(
                    [sys.executable, str(PROGRAMS / program), *arguments],
                    env={
                        **os.environ,
                        **environ_of(process, processes, replicas, port),
                        "FLAGS": flags,
                        "TF_CPP_MIN_LOG_LEVEL": "2",
                        **environ,
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for process in range(processes)
            ]
            try:
                yield running
            finally:
                for child in running:
                    child.kill()
                    child.communicate(timeout=TIMEOUT_S)

    return started


@pytest.fixture
def outcomes(
    started: Callable[..., AbstractContextManager[list[subprocess.Popen[str]]]],
) -> Callable[..., list[tuple[int, list[str], str]]]:
    """Return a function that runs a program like `started`, and returns how each process ended.

    That is its exit code, the lines that it printed by ``say``, and its standard error.
    """

    def outcomes(
        program: str, *arguments: str, replicas: int, processes: int, **environ: str
    ) -> list[tuple[int, list[str], str]]:
        with started(program, *arguments, replicas=replicas, processes=processes, **environ) as running:
            # All are read at once, so that no pipe fills up.
            texts: list[tuple[str, str]] = [("", "")] * processes
            threads = [
                threading.Thread(
                    target=lambda i=i, process=process: texts.__setitem__(
                        i, process.communicate(timeout=TIMEOUT_S)
                    )
                )
                for i, process in enumerate(running)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT_S + 1)
            return [
                (
                    process.returncode,
                    [line.removeprefix("> ") for line in out.splitlines() if line.startswith("> ")],
                    err,
                )
                for process, (out, err) in zip(running, texts, strict=True)
            ]

    return outcomes
