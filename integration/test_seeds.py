"""Plain torch_xla scripts run unmodified through ``polyxla run``."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyxla_testing import RuntimeUnderTest

SEEDS = Path(__file__).parent / "seeds"
pytestmark = [pytest.mark.long, pytest.mark.torch_xla("programs for torch_xla")]


def test_the_tensors_script_runs(runtime: RuntimeUnderTest) -> None:
    done = runtime.run(str(SEEDS / "tensors.py"))
    assert done.returncode == 0, done.stderr
    assert "xla:" in done.stdout.splitlines()[0]
    assert "devices do not mix: True" in done.stdout
    assert "hardware " in done.stdout


def test_the_single_device_mnist_script_runs(runtime: RuntimeUnderTest) -> None:
    done = runtime.run(str(SEEDS / "mnist_single.py"), "2560")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    numbers = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    assert numbers["steps"] == 20
    # All images and labels are equal, so the loss can only fall.
    assert numbers["last"] < numbers["first"]


def test_the_saving_script_runs(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    done = runtime.run(str(SEEDS / "saving.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "saved and loaded both ways" in done.stdout
    assert (tmp_path / "model.pt").stat().st_size > 0
