"""Kernels of Pallas on an emulated TPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "programs" / "kernels.py"

pytestmark = pytest.mark.emulated_tpu


def run(file: Path, *names: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"POLYXLA_EMULATE": "v5e-1"} | variables
    command = [sys.executable, str(PROGRAM), str(file), *names]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)


def line_of(text: str) -> int:
    lines = PROGRAM.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if text in line)
    return number


@pytest.mark.slow
def test_kernels_compute_and_give_gradients(tmp_path: Path) -> None:
    done = run(tmp_path / "results.pt", "matmul", "softmax", "copied", "attention")
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt")
    assert sorted(results) == ["attention", "copied", "k", "matmul", "q", "softmax", "v"]
    for name, (found, expected) in results.items():
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.slow
def test_a_race_is_an_error_with_its_lines(tmp_path: Path) -> None:
    done = run(tmp_path / "none.pt", "copied", "racing", POLYXLA_EMULATE_KERNELS="races")
    assert done.returncode > 0
    _, message, races = done.stderr.partition("has races; wait for a copy")
    assert message, done.stderr
    for text in ("copy(number + 1).start()", "= buffers[lax.rem(number, 2)] * 2"):
        assert f"kernels.py:{line_of(text)}:" in races


@pytest.mark.slow
def test_kernels_without_races_pass_the_detector(tmp_path: Path) -> None:
    done = run(tmp_path / "results.pt", "copied", POLYXLA_EMULATE_KERNELS="races")
    assert done.returncode == 0, done.stderr
    found, expected = torch.load(tmp_path / "results.pt")["copied"]
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("misshapen", "the last two dimensions of your block shape are divisible by 8 and 128"),
        ("random", "cannot run where a TPU is emulated; JAX cannot interpret this one: "),
    ],
)
def test_what_cannot_run_says_why(name: str, said: str, tmp_path: Path) -> None:
    done = run(tmp_path / "none.pt", name)
    assert done.returncode > 0
    assert said in done.stderr


def test_another_value_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path / "none.pt", "copied", POLYXLA_EMULATE_KERNELS="race")
    assert done.returncode > 0
    assert "POLYXLA_EMULATE_KERNELS='race' is not 'races'" in done.stderr
    assert "Write that, or unset it." in done.stderr
