"""The first half of ``polyxla fits``, which needs no libtpu: a script's programs on an emulated TPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyxla_fits.chips import Target
from polyxla_fits.collected import CollectedProgram
from polyxla_fits.emulated_run import EmulatedRun, ScriptFailedError
from polyxla_fits.frameworks import TORCH_XLA
from polyxla_fits.progress import Progress

pytestmark = pytest.mark.pjrt

PROGRAMS = Path(__file__).parent / "programs"
STEPS = 3


def collect(
    command: list[str], kind: str, directory: Path, environ: dict[str, str], timeout_s: float = 250
) -> list[CollectedProgram]:
    run = EmulatedRun(command, Target.parse(kind, TORCH_XLA), TORCH_XLA, STEPS, timeout_s)
    return run.collect(directory, environ, Progress())


def line_of(path: Path, text: str) -> str:
    """Return ``file:line`` of the only line that contains the text."""
    (number,) = (number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)
    return f"{path}:{number}"


# The second batch is one that no CPU computes.
@pytest.mark.parametrize("batch_size", [8, 100_000_000])
def test_an_endless_loop_is_stopped_when_it_has_no_new_programs(
    batch_size: int, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    program = PROGRAMS / "train_mlp.py"
    found = collect([str(program), str(batch_size)], "v5e-1", tmp_path, clean_environ)
    # A relative path if the suite runs in the repository.
    assert found[-1].line is not None
    assert line_of(program, "torch_xla.sync()").endswith(found[-1].line)
    assert found[-1].executions >= STEPS
    assert found[-1].hlo.exists()
    assert found[-1].options.exists()


def test_replicas_of_a_trainer_have_one_program_and_the_line_of_its_step(
    clean_environ: dict[str, str], tmp_path: Path
) -> None:
    found = collect(["-m", "polyxla_examples.digits", "--epochs", "1"], "v5e-4", tmp_path, clean_environ)
    steps = [one for one in found if one.executions >= STEPS and one.line is not None]
    assert steps
    assert "digits.py:" in str(steps[0].line)


def test_a_script_that_fails_is_shown(clean_environ: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('wrong learning rate')")
    with pytest.raises(ScriptFailedError, match=r"with code 1\. Its last lines:[^$]*wrong learning rate"):
        collect([str(script)], "v5e-1", tmp_path / "programs", clean_environ)


def test_a_script_without_a_device_is_named(clean_environ: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('nothing to do')")
    with pytest.raises(ScriptFailedError, match="used no device of the played TPU"):
        collect([str(script)], "v5e-1", tmp_path / "programs", clean_environ)


def test_a_script_that_takes_too_long_is_ended(clean_environ: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(1000)")
    with pytest.raises(ScriptFailedError, match=r"in 8 s \(--timeout\)"):
        collect([str(script)], "v5e-1", tmp_path / "programs", clean_environ, timeout_s=8)


def test_the_peaks_are_those_of_training() -> None:
    from polyxla_fits.chips import PEAKS
    from polyxla_training.observe.chip_peaks import CHIP_PEAKS

    known = {name.removeprefix("TPU "): peak.peak_flops for name, peak in CHIP_PEAKS.items()}
    assert {name: peak.flops for name, peak in PEAKS.items()} == {name: known[name] for name in PEAKS}
