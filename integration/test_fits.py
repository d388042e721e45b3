"""The first half of ``polyxla fits``, which needs no libtpu: a script's programs on an emulated TPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyxla_testing.processes import is_alive, wait_until
from polyxla_tools.fits.collected import CollectedProgram
from polyxla_tools.fits.emulated_run import EmulatedRun, ScriptFailedError
from polyxla_tools.fits.target import TargetTpu, installed_framework

pytestmark = pytest.mark.emulated_tpu

PROGRAMS = Path(__file__).parent / "programs"
STEPS = 3
LAYERS = 24
FRAMEWORK = installed_framework()


def collect(
    command: list[str], kind: str, directory: Path, environ: dict[str, str], timeout_s: float = 250
) -> list[CollectedProgram]:
    run = EmulatedRun(command, TargetTpu.parse(kind, FRAMEWORK), FRAMEWORK, STEPS, timeout_s)
    return run.collect(directory, environ, lambda _: None)


def line_of(path: Path, text: str) -> str:
    """Return ``file:line`` of the only line that contains the text."""
    (number,) = (number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)
    return f"{path}:{number}"


# The second batch is one that no CPU computes.
@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [pytest.param(8, marks=pytest.mark.long), 100_000_000])
def test_an_endless_loop_is_stopped_when_it_has_no_new_programs(
    batch_size: int, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    program = PROGRAMS / "train_deep.py"
    found = collect([str(program), str(batch_size), str(LAYERS)], "v5e-1", tmp_path, clean_environ)
    # Relative paths if the suite runs in the repository. The optimizer's programs are the last of a step.
    steps = [
        recorded
        for recorded in found
        if recorded.line and line_of(program, "replica.step(").endswith(recorded.line)
    ]
    assert steps
    assert max(step.executions for step in steps) >= STEPS
    assert all(recorded.hlo.exists() and recorded.options.exists() for recorded in found)
    # What is alive has its real size, though large arrays are not computed.
    most = max(recorded.alive[0].in_use_bytes for recorded in found)
    assert most >= 4 * 64 * (batch_size if FRAMEWORK.is_eager else 64 * LAYERS)
    if FRAMEWORK.is_eager:
        check_that_equal_layers_were_not_taken_for_steps(found, program)


def check_that_equal_layers_were_not_taken_for_steps(found: list[CollectedProgram], program: Path) -> None:
    lines = {recorded.operation: recorded.line for recorded in found}
    assert line_of(program, "model(images)").endswith(str(lines["linear"]))
    assert line_of(program, "model(images)").endswith(str(lines["linear_backward"]))
    # A stop within the first step would leave out the optimizer.
    assert any(recorded.operation and recorded.operation.startswith("foreach_addcdiv") for recorded in found)
    (linear,) = (recorded for recorded in found if recorded.operation == "linear")
    assert linear.executions >= STEPS * LAYERS


@pytest.mark.slow
def test_replicas_of_a_trainer_have_one_program_and_the_line_of_its_step(
    clean_environ: dict[str, str], tmp_path: Path
) -> None:
    found = collect(["-m", "polyxla_examples.digits", "--epochs", "1"], "v5e-4", tmp_path, clean_environ)
    steps = [recorded for recorded in found if recorded.executions >= STEPS and recorded.line is not None]
    assert steps
    assert "digits.py:" in str(steps[0].line)


def test_a_script_that_fails_is_shown(clean_environ: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('wrong learning rate')")
    with pytest.raises(
        ScriptFailedError,
        match=r"failed on the emulated TPU, code 1\. Its last lines:[^$]*wrong learning rate",
    ):
        collect([str(script)], "v5e-1", tmp_path / "programs", clean_environ)


def test_a_script_without_a_device_is_named(clean_environ: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('nothing to do')")
    with pytest.raises(ScriptFailedError, match="used no device of the emulated TPU"):
        collect([str(script)], "v5e-1", tmp_path / "programs", clean_environ)


@pytest.mark.slow
def test_a_script_that_takes_too_long_is_ended(clean_environ: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(1000)")
    with pytest.raises(ScriptFailedError, match=r"in 8 s \(--timeout\)"):
        collect([str(script)], "v5e-1", tmp_path / "programs", clean_environ, timeout_s=8)


def test_a_killed_command_leaves_no_script(clean_environ: dict[str, str], tmp_path: Path) -> None:
    script, started = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(
        f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)"
    )
    collecting = f"""if True:
        from pathlib import Path
        from integration.test_fits import collect
        import os
        collect([{str(script)!r}], "v5e-1", Path({str(tmp_path / "programs")!r}), dict(os.environ))"""
    root = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", collecting], env=clean_environ, cwd=root) as process:
        wait_until(lambda: started.exists() and bool(started.read_text()), "start of the script", 100)
        process.kill()
    pid = int(started.read_text())
    try:
        wait_until(lambda: not is_alive(pid), "end of the script", 30)
    finally:
        if is_alive(pid):
            os.kill(pid, 9)
