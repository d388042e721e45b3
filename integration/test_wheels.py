"""The packages install from a folder of their wheels on a bare Python, and then train."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
TIMEOUT_S = 1500.0


@pytest.mark.long
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_digits_trains_after_an_installation_from_a_folder_of_wheels(tmp_path: Path) -> None:
    """Downloads torch."""
    ours = ("PYTHON", "POLYXLA")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist"]
    run(sys.executable, "-m", "pip", *build, *PACKAGES)
    run(sys.executable, "-m", "venv", "env")
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--find-links", "dist", "polyxla[replicas]", "polyxla-examples")
    run(python, "-m", "pip", "check")
    printed = run(python, "-m", "polyxla", "run", "--devices", "2", "-m", "polyxla_examples.digits")
    found = re.search(r"test_accuracy ([\d.]+)", printed)
    assert found, printed
    assert float(found[1]) > 0.97
