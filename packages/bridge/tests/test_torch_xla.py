"""torch_xla on the bridge, in real programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TIMEOUT_S = 150
Run = Callable[..., list[subprocess.CompletedProcess[str]]]
Printed = Callable[..., list[list[str]]]


def test_every_dtype_and_odd_shapes_travel_both_ways(printed: Printed) -> None:
    (lines,) = printed("dtypes_and_shapes.py")
    assert lines == ["CPU CPU 1 all the same"]


@pytest.mark.slow
def test_training_computes_what_torch_computes(printed: Printed) -> None:
    (lines,) = printed("training.py")
    assert lines == ["True True"]


@pytest.mark.slow
def test_memory_of_tensors_is_freed(printed: Printed) -> None:
    (lines,) = printed("freed_memory.py")
    assert lines == ["True"]


@pytest.mark.slow
def test_arrays_reuse_freed_memory_unless_the_user_decides(run: Run) -> None:
    mapped = [
        int(done.stdout)
        for environ in ({}, {"MALLOC_TRIM_THRESHOLD_": "131072"})
        for done in run("kept_memory.py", environs=[environ])
    ]
    # With the largest pages that there are, the array has 128.
    assert mapped[0] < 100 <= mapped[1]


def test_a_step_reuses_the_memory_of_the_arrays_that_it_replaces(printed: Printed) -> None:
    code = """
import torch
import torch_xla
import torch_xla.core.xla_model as xm
x = torch.zeros(1 << 20, device="xla")
torch_xla.sync()
for _ in range(3):
    x += 1
    torch_xla.sync()
print(x.sum().item() / (1 << 20), xm.get_memory_info("xla:0")["peak_bytes_used"] >> 20)
"""
    assert printed(code) == [["3.0 4"]]


def test_an_exception_keeps_its_exit_code_and_text(run: Run) -> None:
    (done,) = run("import torch\nx = torch.ones(2, device='xla') + 1\nraise SystemExit(7)")
    assert done.returncode == 7
    code = "import torch\nx = torch.ones(2, device='xla') + 1\nprint(x.sum().item())\nraise KeyError('mine')"
    (done,) = run(code)
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert "core dumped" not in done.stderr
    assert done.stdout == "4.0\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("return", 0),
        ("raise", 1),
        ("raise after a collective", 1),
        ("raise in a thread", 0),
        ("sys.exit", 3),
        ("os._exit", 3),
        ("interrupt", -signal.SIGINT),
    ],
)
def test_a_process_ends_at_once_while_another_waits_for_it(
    run: Run, tmp_path: Path, ending: str, code: int
) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    waiting, ended = run("ends_while_awaited.py", str(fifo), ending, replicas=2, processes=2)
    assert (waiting.returncode, waiting.stdout, waiting.stderr) == (0, "4.0\n", "")
    assert (ended.returncode, ended.stdout) == (code, "4.0\n"), ended.stderr
    assert ("mine" in ended.stderr) == ending.startswith("raise")


@pytest.mark.parametrize(
    ("error", "text"), [("pjrt", "not finished: replica 0"), ("os", "OSError: gone")], ids=["pjrt", "os"]
)
def test_an_engine_that_cannot_be_closed_is_reported_in_one_line(run: Run, error: str, text: str) -> None:
    (done,) = run("close_fails.py", error)
    assert (done.returncode, done.stdout, done.stderr) == (4, "4.0\n", f"polyxla: {text}\n")


def test_a_profile_has_the_operations_of_the_devices(printed: Printed, tmp_path: Path) -> None:
    (lines,) = printed("profiled.py", str(tmp_path))
    assert lines == ["262144.0", "True", "/device:CUSTOM:polyxla /host:CPU /host:metadata"]


def test_an_unimplemented_function_is_named(run: Run) -> None:
    (done,) = run("unimplemented_call.py")
    assert "PJRT_Client_DmaMap is not implemented by polyxla-bridge" in done.stdout, done.stderr


def test_a_program_ends_when_its_last_step_has(run: Run) -> None:
    (done,) = run("end_while_computing.py")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_tensor_can_be_read_at_its_address(run: Run) -> None:
    (done,) = run("read_by_address.py")
    assert done.stdout == "[1, 2, 3, 4, 5]\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_collectives_of_replicas_that_are_threads(printed: Printed, replicas: int) -> None:
    (lines,) = printed("collectives.py", replicas=replicas)
    assert lines == ["right"] * replicas


@pytest.mark.slow
def test_a_thread_that_frees_tensors_does_not_block_the_step(printed: Printed) -> None:
    (lines,) = printed("finalisers.py")
    assert lines == ["done"]


@pytest.mark.parametrize("size", [2, 1500])
def test_torch_xla_may_wait_for_an_array_with_the_gil_held(printed: Printed, size: int) -> None:
    """Also for one that is still being computed."""
    code = f"""
import torch
import torch_xla
y = torch.eye({size}).to("xla")
x = y @ y @ y @ y
torch_xla.sync()
# It waits until the step before is started.
z = y + 1
torch_xla.sync()
context = torch_xla._XLAC.lowering.LoweringContext("mine")
context.build([x + 1])
print([tensor.sum().item() for tensor in context.parameter_id_tensor_mapping().values() if tensor.dim()])
"""
    assert printed(code) == [[f"[{size}.0]"]]


def test_torch_may_read_a_number_with_the_gil_held(printed: Printed) -> None:
    code = """
import torch
x = torch.arange(4.0, device="xla")
i = torch.tensor(1, device="xla") + 1
print(x[i].item(), torch.full((2,), x[i]).tolist(), torch.add(x, 1, alpha=i).tolist())
x[i] = 7
print(x.tolist(), bool(i == 2))
"""
    assert printed(code) == [["2.0 [2.0, 2.0] [2.0, 3.0, 4.0, 5.0]", "[0.0, 1.0, 7.0, 3.0] True"]]


def test_a_kernel_that_runs_on_the_cpu_below_torch_compile_may_read_with_the_gil_held(
    printed: Printed,
) -> None:
    """Python's dispatcher calls it with the GIL held; torch_xla has no kernel for the operator."""
    code = """
import torch
import torch_xla
x = torch.arange(4.0, device="xla")
f = torch.compile(lambda x: torch.median(x + 1), backend="openxla")
print([f(x + k).item() for k in range(3)])
"""
    assert printed(code) == [["[2.0, 3.0, 4.0]"]]


def test_a_compiled_program_may_wait_for_the_step_before_with_the_gil_held(printed: Printed) -> None:
    code = """
import torch
import torch_xla
x = torch.arange(4.0, device="xla")
f = torch.compile(lambda x: 2 * x, backend="openxla")
found = []
for k in range(20):
    y = x + k
    torch_xla.sync()
    found.append(f(y).sum().item())
print(found == [2.0 * (6 + 4 * k) for k in range(20)])
"""
    assert printed(code) == [["True"]]


def test_a_torch_xla_that_is_linked_in_another_way_is_a_warning(run: Run) -> None:
    code = """
from polyxla_bridge import native
native.LOCKED.polyxla_torch_xla_without_gil = lambda: False
import torch
print(torch.ones(2, device="xla").sum().item())
"""
    (done,) = run(code)
    assert done.stdout == "2.0\n"
    assert "is linked in another way than the wheels of 2.9.0" in done.stderr


@pytest.mark.slow
def test_programs_end_while_their_devices_still_work(run: Run) -> None:
    (done,) = run("early_ends.py")
    assert done.stdout == f"{[0, 1, 2] * 2}\n", done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_a_waiting_replica() -> None:
    """In a new Python process: the others here are forked."""
    script = """
import time, torch, torch_xla
print(torch.ones(2, device="xla").sum().item(), flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PJRT_DEVICE": "CPU_POLYXLA"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "2.0\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert "KeyboardInterrupt" in errors
        assert process.returncode in (1, 130, -signal.SIGINT)
