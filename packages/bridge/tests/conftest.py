"""Programs that use torch_xla, in processes that have it imported: that takes longer than what tests do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Tests count compilations, and a person's programs are not theirs.
os.environ["POLYXLA_COMPILE_CACHE"] = "off"

TIMEOUT_S = 200
SERVER = """
import gc, json, os, sys, time
import torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.runtime as xr
import torch_xla.debug.metrics as met
from torch_xla._internal import pjrt
from polyxla_bridge.engine.jax_engine import JaxEngine

def everywhere(function):
    process, processes = (int(os.environ[f"POLYXLA_BRIDGE_{name}"]) for name in ("PROCESS", "PROCESSES"))
    pjrt.initialize_multiprocess(process, processes)
    # In a forked process torch makes its autograd engine anew at the first use, which no two threads may be;
    # with a queue for each of the devices that there are by then.
    torch.zeros((), requires_grad=True).backward()
    results = pjrt._run_thread_per_device(process, processes, function, pjrt.initialize_multiprocess)
    return [results[ordinal] for ordinal in sorted(results)]

def engine():
    (found,) = [one for one in gc.get_objects() if type(one) is JaxEngine]
    return found

def ended(children, timeout_s):
    codes, end = {}, time.monotonic() + timeout_s
    while len(codes) < len(children):
        for child in children:
            if child not in codes and (status := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(status[1])
            elif child not in codes and time.monotonic() > end:
                os.kill(child, 9)
        time.sleep(0.01)
    return [codes[child] for child in children]

def serve():
    "Answer requests with exit codes; return in a child, with what it is to be."
    for line in sys.stdin:
        request, children = json.loads(line), []
        for program in request["programs"]:
            children.append(os.fork())
            if children[-1] == 0:
                return program
        print(json.dumps(ended(children, request["timeout_s"])), flush=True)
    sys.exit()

program = serve()
for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT), (2, os.O_WRONLY | os.O_CREAT)):
    os.dup2(os.open(program["files"][number], flags), number)
os.environ.update(program["environ"])
# Here and not in a function: the program ends as Python does.
exec(program["code"])
"""


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
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
def run(
    server: subprocess.Popen[str], tmp_path: Path
) -> Callable[..., list[subprocess.CompletedProcess[str]]]:
    """Return what runs a program in each process of a job, and returns how each ended."""

    def run(code: str, replicas: int = 1, processes: int = 1) -> list[subprocess.CompletedProcess[str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # XLA's pools must hold every replica's waiting collectives at once.
        threads = str(max(2, 4 * replicas // processes))
        outputs = [(tmp_path / f"out-{i}", tmp_path / f"err-{i}") for i in range(processes)]
        programs = [
            {
                "code": textwrap.dedent(code),
                "environ": {
                    "POLYXLA_BRIDGE_REPLICAS": str(replicas),
                    "POLYXLA_BRIDGE_PROCESSES": str(processes),
                    "POLYXLA_BRIDGE_PROCESS": str(process),
                    "POLYXLA_BRIDGE_COORDINATOR": f"127.0.0.1:{port}",
                    "NPROC": threads,
                    "XLA_THREAD_POOL_SIZE": threads,
                },
                "files": [os.devnull, *map(str, outputs[process])],
            }
            for process in range(processes)
        ]
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({"programs": programs, "timeout_s": TIMEOUT_S}) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        done = [
            subprocess.CompletedProcess(code, returned, out.read_text(), err.read_text())
            for returned, (out, err) in zip(codes, outputs, strict=True)
        ]
        for path in [path for pair in outputs for path in pair]:
            path.unlink()
        return done

    return run


@pytest.fixture
def printed(
    run: Callable[..., list[subprocess.CompletedProcess[str]]],
) -> Callable[..., list[list[str]]]:
    """Return what runs a program in each process, and returns the lines that each printed."""

    def printed(code: str, replicas: int = 1, processes: int = 1) -> list[list[str]]:
        done = run(code, replicas, processes)
        assert [one.returncode for one in done] == [0] * processes, [one.stderr[-3000:] for one in done]
        # Neither a traceback nor a warning.
        assert [one.stderr for one in done] == [""] * processes
        return [one.stdout.splitlines() for one in done]

    return printed
