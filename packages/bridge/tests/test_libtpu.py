"""The emulated libtpu behind torch_xla's own TPU plugin, opened by processes that prepare nothing."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyxla_bridge import LIBRARY

Run = Callable[..., Any]
SliceOf = Callable[[str, str, list[int]], list[dict[str, str]]]


@pytest.fixture
def slice_of(free_port: Callable[[], int], tmp_path: Path) -> SliceOf:
    """Return a function that returns the variables of processes that drive one chip each."""
    return lambda chips, bounds, visible: _slice(
        chips, bounds, tmp_path, visible, [free_port() for _ in visible]
    )


def _slice(chips: str, bounds: str, dev: Path, visible: list[int], ports: list[int]) -> list[dict[str, str]]:
    return [
        {
            "PJRT_DEVICE": "TPU",
            "TPU_LIBRARY_PATH": str(LIBRARY),
            "POLYXLA_LIBTPU_HOST": chips,
            "POLYXLA_LIBTPU_DEV": str(dev),
            "POLYXLA_SECRET": "of one job",
            # torch_xla asks for these itself. libtpu reads the type from the metadata server.
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": f"{chips.partition(':')[0]}-8",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_PROCESS_BOUNDS": bounds,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_VISIBLE_CHIPS": str(chip),
            "CLOUD_TPU_TASK_ID": str(task),
            "TPU_PROCESS_ADDRESSES": ",".join(f"localhost:{port}" for port in ports),
            "TPU_PROCESS_PORT": str(ports[task]),
        }
        for task, chip in enumerate(visible)
    ]


@pytest.mark.slow
def test_torch_xla_trains_on_an_emulated_v4(run: Run, slice_of: SliceOf) -> None:
    environs = slice_of("v4:2x2x1", "2,2,1", [0, 1, 2, 3])
    done = run("emulated_tpu.py", replicas=4, processes=4, environs=environs)
    assert [process.returncode for process in done] == [0] * 4, [process.stderr[-2000:] for process in done]
    lines = [process.stdout.splitlines() for process in done]
    assert [line[0] for line in lines] == [f"TPU {task} 4" for task in range(4)]
    places = [
        ("TPU:0", [0, 0, 0], 0),
        ("TPU:1", [1, 0, 0], 0),
        ("TPU:2", [0, 1, 0], 0),
        ("TPU:3", [1, 1, 0], 0),
    ]
    assert [ast.literal_eval(line[1]) for line in lines] == [places] * 4
    assert [line[2] for line in lines] == [f"[({ordinal}, [6.0, 6.0])]" for ordinal in (0, 2, 1, 3)]
    assert [line[3] for line in lines] == ["32"] * 4, "GiB"
    assert [process.stderr for process in done] == [""] * 4


def test_a_chip_of_an_emulated_v3_is_two_devices(run: Run, slice_of: SliceOf) -> None:
    (done,) = run("emulated_tpu.py", environs=slice_of("v3:2x2x1", "1,1,1", [3]))
    assert done.returncode == 0, done.stderr[-2000:]
    counts, places, sums, memory_gib = done.stdout.splitlines()
    assert memory_gib == "16"
    assert (counts, sums) == ("TPU 0 2", "[(0, [1.0, 1.0]), (1, [1.0, 1.0])]")
    assert ast.literal_eval(places) == [("TPU:0", [0, 0, 0], 0), ("TPU:1", [0, 0, 0], 1)]


@pytest.mark.parametrize(("handler", "code"), [("SIG_DFL", -15), ("SIG_IGN", 0)])
def test_sigterm_prints_a_stack_unless_the_process_handles_it(handler: str, code: int) -> None:
    program = (
        "import os, signal\n"
        "from polyxla_bridge.libtpu.client import _print_stack_at_sigterm\n"
        f"signal.signal(signal.SIGTERM, signal.{handler})\n"
        "_print_stack_at_sigterm()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert ("most recent call first" in done.stderr) == (code != 0)


def test_jax_computes_on_an_emulated_v4_beside_torch_xla(run: Run, slice_of: SliceOf) -> None:
    (environ,) = slice_of("v4:2x2x1", "1,1,1", [0])
    whole = {"TPU_VISIBLE_CHIPS": "0,1,2,3", "JAX_FORCE_TPU_INIT": "1"}
    (done,) = run("jax_computes.py", environs=[environ | whole])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "2.0",
        "[tpu:0, tpu:1, tpu:2, tpu:3] 36.0",
        "[0. 3. 6. 9.] {tpu:1}",
        "28.0 4",
        "4.0",
    ]


@pytest.mark.slow
def test_jax_partitions_programs_over_an_emulated_v4(run: Run, slice_of: SliceOf) -> None:
    (environ,) = slice_of("v4:2x2x1", "1,1,1", [0])
    whole = {"TPU_VISIBLE_CHIPS": "0,1,2,3", "JAX_FORCE_TPU_INIT": "1"}
    (done,) = run("jax_partitioned.py", environs=[environ | whole])
    assert done.returncode == 0, done.stderr[-3000:]
    cases = ["columns", "call", "result", "gradient", "constraint", "scan", "kernel", "pads", "shard_map"]
    assert done.stdout.splitlines() == ["2.0", *(f"{case} True" for case in cases)]


def test_jax_computes_on_an_emulated_v4_without_torch_xla(slice_of: SliceOf) -> None:
    code = """
import sys
import jax
import jax.numpy as jnp
jax.config.update("jax_platforms", "tpu")
print(jax.devices(), jax.jit(lambda x: x @ x + 1)(jnp.ones((3, 3))).sum(), "torch_xla" in sys.modules)
"""
    done = without_torch_xla(code, slice_of)
    assert (done.returncode, done.stdout) == (0, "[tpu:0] 36.0 False\n"), done.stderr[-3000:]


@pytest.mark.slow
def test_jax_may_end_its_client_and_make_another(slice_of: SliceOf) -> None:
    code = """
import gc
import jax
import jax.numpy as jnp
from jax.extend.backend import clear_backends
jax.config.update("jax_platforms", "tpu")
for number in range(3):
    client = jax.devices()[0].client
    print(number, jnp.full(3, number).sum())
    del client
    jax.clear_caches()
    clear_backends()
    gc.collect()
"""
    done = without_torch_xla(code, slice_of)
    assert (done.returncode, done.stdout) == (0, "0 0\n1 3\n2 6\n"), done.stderr[-3000:]


def without_torch_xla(code: str, slice_of: SliceOf) -> subprocess.CompletedProcess[str]:
    """Run a program that opens the library without torch_xla."""
    (environ,) = slice_of("v4:2x2x1", "1,1,1", [0])
    # Not by `run`, whose processes are forked from one with torch_xla.
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ, "JAX_FORCE_TPU_INIT": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_wrong_box_is_refused_in_every_process(run: Run, slice_of: SliceOf) -> None:
    done = run("emulated_tpu.py", replicas=2, processes=2, environs=slice_of("v4:2x2x1", "2,1,1", [0, 1]))
    assert [process.returncode for process in done] == [1, 1]
    assert all(
        "duplicate coordinate assignment: two of the chips in use" in process.stderr for process in done
    ), done


def test_an_emulated_libtpu_that_cannot_start_says_why(run: Run, slice_of: SliceOf) -> None:
    code = "import sys, torch; sys.modules['polyxla_bridge.libtpu'] = None; torch.ones(2, device='xla')"
    (done,) = run(code, environs=slice_of("v4:2x2x1", "1,1,1", [0]))
    assert done.returncode == 1
    assert "ModuleNotFoundError: import of polyxla_bridge.libtpu halted" in done.stderr
    assert "polyxla: the emulated libtpu could not start, see the error above" in done.stderr


def test_a_chip_in_use_is_refused_with_its_process(run: Run, slice_of: SliceOf) -> None:
    (environ,) = slice_of("v4:2x2x1", "1,1,1", [2])
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(f"\0polyxla-libtpu/{environ['POLYXLA_LIBTPU_DEV']}/accel2")
        held.listen()
        (done,) = run("emulated_tpu.py", environs=[environ])
    assert done.returncode == 1
    assert f"The TPU is already in use by process with pid {os.getpid()}." in done.stderr
