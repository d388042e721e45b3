"""The ways to start replicas: plain python, torchrun, fork, the cells of a notebook."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient

from polyxla import Replica, UsageError, seed_everything
from polyxla.plugin import free_ports, random_state
from polyxla_testing import RuntimeUnderTest

SEEDS, PROGRAMS = Path(__file__).parent / "seeds", Path(__file__).parent / "programs"
TIMEOUT_S = 300
MKLDNN: Any = torch.backends.mkldnn


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def sums(output: str) -> list[tuple[str, ...]]:
    return sorted(re.findall(r"ordinal (\d+) of (\d+) sum ([\d.]+)", output))


def torchrun(count: int, *command: str) -> list[str]:
    (port,) = free_ports(1)
    options = [f"--nproc-per-node={count}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *command]


@pytest.mark.slow
def test_plain_python_starts_the_number_of_replicas_in_the_environment(clean_environ: dict[str, str]) -> None:
    environ = {**clean_environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    done = run([sys.executable, str(SEEDS / "all_reduce.py")], environ)
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == [("0", "2", "1.0"), ("1", "2", "1.0")]


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "threads"), [(None, max(1, len(os.sched_getaffinity(0)) // 4)), ("2", 2)])
def test_replicas_divide_the_cores_among_torchs_threads(
    clean_environ: dict[str, str], chosen: str | None, threads: int
) -> None:
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"} | (
        {"OMP_NUM_THREADS": chosen} if chosen else {}
    )
    done = run([sys.executable, str(PROGRAMS / "count_threads.py")], clean_environ | variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"THREADS [{threads}, {threads}, {threads}, {threads}]\n"


@pytest.mark.slow
def test_a_replica_imports_the_script_before_it_opens_a_device(clean_environ: dict[str, str]) -> None:
    environ = {**clean_environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    done = run([sys.executable, str(PROGRAMS / "enable_plugins.py")], environ)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["ORDINAL 0", "ORDINAL 1"]


@pytest.mark.slow
def test_a_launched_function_may_use_what_its_module_makes_at_import(clean_environ: dict[str, str]) -> None:
    # A lock cannot be pickled; the function is sent by its name alone.
    environ = {**clean_environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    done = run([sys.executable, str(PROGRAMS / "lock_at_import.py")], environ)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["LOCKED 0", "LOCKED 1"]


@pytest.mark.slow
@pytest.mark.pjrt
def test_a_launch_works_where_warnings_are_errors(clean_environ: dict[str, str]) -> None:
    environ = {**clean_environ, "PJRT_DEVICE": "CPU", "POLYXLA_DEVICES": "2", "PYTHONWARNINGS": "error"}
    done = run([sys.executable, str(PROGRAMS / "gather_ordinals.py")], environ)
    assert (done.returncode, done.stdout) == (0, "RESULT [([0, 1], 2), ([0, 1], 2)]\n"), done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("device", ["CPU", None])
def test_each_process_of_torchrun_is_a_replica(clean_environ: dict[str, str], device: str | None) -> None:
    environ = {**clean_environ, **({"PJRT_DEVICE": device} if device else {})}
    done = run(torchrun(2, str(SEEDS / "all_reduce.py")), environ)
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == [("0", "2", "1.0"), ("1", "2", "1.0")]


@pytest.mark.slow
def test_a_launch_under_torchrun_joins_its_processes(clean_environ: dict[str, str]) -> None:
    done = run(torchrun(2, str(PROGRAMS / "gather_ordinals.py")), {**clean_environ, "PJRT_DEVICE": "CPU"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RESULT [([0, 1], 2)]") == 2


@pytest.mark.long
def test_polyxla_run_starts_the_fork_server_before_the_script(
    clean_environ: dict[str, str], tmp_path: Path
) -> None:
    script = PROGRAMS / "child_processes.py"
    command = [sys.executable, "-m", "polyxla", "run", "--devices", "2", str(script)]
    # A cold start: a prepared process would fork the server, which is then no child of the program.
    done = run(command, {**clean_environ, "PJRT_DEVICE": "CPU", "XDG_RUNTIME_DIR": str(tmp_path)})
    assert "RESULT 1 True" in done.stdout, done.stderr


@pytest.mark.long
def test_a_torchrun_with_another_number_of_processes_is_refused(clean_environ: dict[str, str]) -> None:
    done = run(torchrun(2, str(SEEDS / "all_reduce.py")), {**clean_environ, "POLYXLA_EMULATE": "v5e-4"})
    assert done.returncode != 0
    assert "torchrun has started 2 processes, but 4 replicas here are" in done.stderr
    assert "Write torchrun --nproc-per-node 4." in done.stderr


@pytest.mark.torch_xla("a program for torch_xla")
def test_using_a_device_without_launching_the_replicas_asked_for_ends_the_program(
    runtime: RuntimeUnderTest,
) -> None:
    program = PROGRAMS / "use_without_launch.py"
    done = runtime.run("--devices", "4", str(program))
    assert done.returncode == 2, done.stderr
    *caught, uncaught = [line for line in done.stderr.splitlines() if "uses a device" in line]
    places = re.findall(r"LINE (\d+) CODE 2", done.stdout)
    # The names come before the counts, which need no device.
    assert done.stdout.startswith("COUNT 4 4\n")
    assert len(places) == len(caught) == 6
    for line, place in zip([*caught, uncaught], [*places, "26"], strict=True):
        assert f"4 replicas were asked for, but {_shown(program)}:{place} uses a device without" in line
        assert "(from --devices 4). Use devices only in a function" in line
        assert "polyxla run --each" in line
    assert "Traceback" not in done.stderr


def _shown(program: Path) -> Path:
    """Return a program's path as messages show it."""
    return program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program


@pytest.mark.long
def test_plain_python_ends_there_too(clean_environ: dict[str, str]) -> None:
    program = PROGRAMS / "touch_device.py"
    done = run([sys.executable, str(program)], {**clean_environ, "POLYXLA_DEVICES": "2"})
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
    assert line.startswith(
        f"polyxla: error: 2 replicas were asked for, but {_shown(program)}:6 uses a device"
    )
    assert "(from POLYXLA_DEVICES=2" in line


@pytest.mark.slow
def test_a_program_may_use_a_tpu_host_without_a_launch(clean_environ: dict[str, str]) -> None:
    # On a TPU VM, it sees all chips of its host.
    done = run(
        [sys.executable, str(PROGRAMS / "use_all_devices.py")], {**clean_environ, "POLYXLA_EMULATE": "v4-8"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "RESULT ['xla:0', 'xla:1', 'xla:2', 'xla:3'] [6, 10, 14, 18] [1, 1]\n"
    assert (
        "emulating a v4-8 on this machine's CPU: 4 devices, and no replicas launched (to train" in done.stderr
    )
    assert (
        "write torch_xla.launch(train) or polyxla.launch(train), or run the script by polyxla run --each)"
        in done.stderr
    )


@pytest.mark.parametrize("count", [2, 1])
@pytest.mark.long
def test_a_program_can_spawn_a_number_of_cpu_replicas(clean_environ: dict[str, str], count: int) -> None:
    command = [sys.executable, str(PROGRAMS / "spawn_replicas.py"), str(count)]
    done = run(command, {**clean_environ, "PJRT_DEVICE": "CPU"})
    assert done.returncode == 0, done.stderr
    expected = [f"REPLICA {index} {count}" for index in range(count)]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.slow
def test_sys_exit_0_in_a_torch_xla_launch_ends_the_program_if_all_replicas_call_it(
    clean_environ: dict[str, str],
) -> None:
    done = run(
        [sys.executable, str(PROGRAMS / "exit_in_replica.py")], {**clean_environ, "PJRT_DEVICE": "CPU"}
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(
        r"launch 2: ReplicaLostError: the replica with ordinal 1 called sys\.exit\(0\) at \S+:14; .*",
        lines[0],
    )
    # torch_xla, too, ends the program then.
    ended = ["all of 2", "spawn 2", "launch 1", "spawn 1"]
    assert lines[1:] == [f"{name}: SystemExit: 0" for name in ended]


@pytest.mark.torch_xla("a program for torch_xla")
@pytest.mark.parametrize(
    ("init_method", "emulated"),
    [("xla://", None), pytest.param("env://", "v4-8", marks=pytest.mark.long)],
)
def test_a_program_runs_once_in_each_replica(
    runtime: RuntimeUnderTest, init_method: str, emulated: str | None
) -> None:
    if emulated and runtime.name != "pjrt":
        pytest.skip("only pjrt emulates")
    environ = {"POLYXLA_EMULATE": emulated, "PJRT_DEVICE": ""} if emulated else {}
    devices = [] if emulated else ["--devices", "2"]
    size = 4 if emulated else 2
    done = runtime.run("--each", *devices, str(PROGRAMS / "run_in_each.py"), init_method, **environ)
    assert done.returncode == 0, done.stderr
    total = sum(range(size))
    launched = f"[({list(range(size))}, {size})]"
    assert sorted(done.stdout.splitlines()) == [
        f"EACH {rank} {rank} {size} {total} {total} {launched} {[rank]} {[rank]}" for rank in range(size)
    ]


@pytest.mark.long
@pytest.mark.torch_xla("a program for torch_xla")
def test_the_replica_that_fails_in_run_each_is_named(runtime: RuntimeUnderTest) -> None:
    done = runtime.run("--each", "--devices", "2", str(PROGRAMS / "fail_in_each.py"))
    assert done.returncode == 3
    assert "the replica with ordinal 1 called sys.exit(3) at " in done.stderr


@pytest.mark.slow
def test_two_cells_of_a_notebook_can_launch_and_a_training_has_one_bar(clean_environ: dict[str, str]) -> None:
    environ = {**clean_environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    # A kernel that sees pytest's variable does not capture what child processes print.
    environ.pop("PYTEST_CURRENT_TEST")
    _, *cells = (PROGRAMS / "notebook_cells.py").read_text().split("# %%\n")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    # A real kernel, in a process of its own; a cell that raises raises here.
    NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3").execute(env=environ)
    printed = ["".join(output.text for output in cell.outputs) for cell in notebook.cells[:2]]
    # The lines of the replicas' processes appear under the cell that launched them.
    assert sorted(printed[0].splitlines()) == ["CELL 0 20", "CELL 1 20"]
    assert sorted(printed[1].splitlines()) == ["CELL 0 200", "CELL 1 200", "LAUNCHED [200, 200]"]
    # The bar is one output, which has been updated; beside it are lines of text.
    outputs = notebook.cells[2].outputs
    (bar,) = [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]
    assert re.search(r"epoch 2/2 .*40/40.* it/s +lr 0\.01 +loss", " ".join(bar.split())), bar
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert re.search(r"^all +Line +1 +1 +4 bytes$", text, re.MULTILINE), text
    assert "epoch" not in text


@pytest.mark.slow
def test_forked_replicas_share_the_objects_of_the_parent(clean_environ: dict[str, str]) -> None:
    environ = {**clean_environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    done = run([sys.executable, str(PROGRAMS / "share_by_fork.py")], environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SAME True") == 2


def _process(replica: Replica) -> tuple[int, int]:
    return os.getpid(), replica.all_reduce(replica.ordinal)


@pytest.mark.parametrize("start_method", [pytest.param("spawn", marks=pytest.mark.long), "forkserver"])
def test_each_start_method_starts_two_processes(runtime: RuntimeUnderTest, start_method: str) -> None:
    answers = runtime.launch(_process, devices=2, start_method=start_method)
    assert len({os.getpid(), *(pid for pid, _ in answers)}) == 3
    assert [total for _, total in answers] == [1, 1]


def _process_settings(_: Replica | None = None) -> list[Any]:
    return [
        torch.get_default_dtype(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_anomaly_enabled(),
        torch.multiprocessing.get_sharing_strategy(),
        torch.get_float32_matmul_precision(),
        torch.rand(2).tolist(),
        np.random.rand(2).tolist(),  # noqa: NPY002
        random.random(),
    ]


@pytest.fixture
def process_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What a script may set at its top level; afterwards it is unset."""
    monkeypatch.setattr("polyxla.process_settings.seeds", [])
    with random_state.preserved_host_state():
        try:
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.autograd.set_detect_anomaly(True)
            torch.multiprocessing.set_sharing_strategy("file_system")
            # torch's own setter. With torch_xla, the other also warns if this process has compiled programs.
            torch._C._set_float32_matmul_precision("high")
            seed_everything(7)
            settings = _process_settings()
            # TorchTPU, in this process, says what it makes of torch's own setter.
            settings[4] = "high"
            seed_everything(7)
            yield settings
        finally:
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            torch.autograd.set_detect_anomaly(False)
            torch.multiprocessing.set_sharing_strategy("file_descriptor")
            torch._C._set_float32_matmul_precision("highest")
            MKLDNN.matmul.fp32_precision = "none"


@pytest.mark.parametrize("start_method", [pytest.param("spawn", marks=pytest.mark.long), "forkserver"])
def test_what_a_program_sets_for_its_process_holds_in_its_replicas(
    runtime: RuntimeUnderTest, start_method: str, process_settings: list[Any]
) -> None:
    found = runtime.launch(_process_settings, devices=2, start_method=start_method)
    assert found == [process_settings] * 2


def test_replicas_draw_other_numbers_from_pythons_generator_where_it_is_not_seeded(
    runtime: RuntimeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of this process may have seeded it.
    monkeypatch.setattr("polyxla.process_settings.seeds", [])
    assert len(set(runtime.launch(_random_number, devices=2))) == 2


def _random_number(_: Replica) -> float:
    return random.random()


def test_several_replicas_inline_are_refused(runtime: RuntimeUnderTest) -> None:
    with pytest.raises(UsageError, match="2 replicas cannot run inline"):
        runtime.launch(_process, devices=2, start_method="inline")
