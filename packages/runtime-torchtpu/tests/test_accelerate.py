"""Releases of Accelerate and transformers whose private parts this runtime does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STATE = """
class PartialState:
    def __init__(self, cpu=False):
        print("on the CPU")
"""
TRAINER = """
class Trainer:
    def __init__(self, model=None, args=None):
        print("on the CPU")
"""
TRAIN = "from types import SimpleNamespace as Arguments; from transformers.trainer import Trainer; Trainer"


@pytest.fixture
def untested(tmp_path: Path) -> Path:
    """A directory with packages of these names, of releases that never were."""
    for name, module, code in (("accelerate", "state", STATE), ("transformers", "trainer", TRAINER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"from {name} import {module}")
        (tmp_path / name / f"{module}.py").write_text(code)
        info = tmp_path / f"{name}-0.15.7.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 0.15.7\n")
    return tmp_path


def run(code: str, packages: Path, tpu: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(packages), "POLYXLA_EMULATE": tpu},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("code", "release", "where", "fix"),
    [
        pytest.param(
            "import accelerate; accelerate.state.PartialState()",
            "accelerate 0.15.7",
            "accelerate.state.PartialState",
            "Write pip install 'accelerate==1.15.*', or Accelerator(cpu=True) for the CPU.",
            id="accelerate",
        ),
        pytest.param(
            f"{TRAIN}(None, Arguments(use_cpu=False))",
            "transformers 0.15.7",
            "transformers.trainer.Trainer",
            "Write pip install 'transformers==5.24.*', or TrainingArguments(use_cpu=True) for the CPU.",
            id="transformers",
        ),
    ],
)
def test_a_release_that_was_not_tested_is_refused_on_a_tpu(
    untested: Path, code: str, release: str, where: str, fix: str
) -> None:
    done = run(code, untested, "v5e-1")
    assert done.returncode != 0
    reason = "was not tested on TorchTPU, and may train each process alone or resume wrongly"
    said = f"polyxla.errors.UsageError: {release} {reason} (from {where}). {fix}"
    assert done.stderr.splitlines()[-1] == said
    assert done.stdout.splitlines()[-1:] != ["on the CPU"]


@pytest.mark.parametrize(
    ("code", "tpu"),
    [
        pytest.param("import accelerate; accelerate.state.PartialState(True)", "v5e-1", id="cpu"),
        pytest.param("import accelerate; accelerate.state.PartialState()", "", id="no-tpu"),
        pytest.param(f"{TRAIN}(args=Arguments(use_cpu=True))", "v5e-1", id="trainer-cpu"),
    ],
)
def test_it_trains_on_the_cpu_as_before(untested: Path, code: str, tpu: str) -> None:
    done = run(code, untested, tpu)
    assert done.stdout.splitlines()[-1:] == ["on the CPU"], done.stderr[-2000:]
