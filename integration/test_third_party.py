"""A third-party runtime is installed, chosen and trained with like the bundled runtimes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOY = Path(__file__).parent / "toy_runtime"
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def toy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the toy runtime and install it with pip into a separate directory."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(TOY)], check=True, timeout=TIMEOUT_S)
    return str(target)


def polyxla(toy_path: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PJRT_", "XRT_"))}
    return subprocess.run(
        [sys.executable, "-m", "polyxla", *arguments],
        env={**clean, "PYTHONPATH": toy_path, **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def last_line(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text.splitlines()[-1])
    return document


def test_it_is_listed_with_the_bundled_runtimes_and_not_chosen_by_default(toy_path: str) -> None:
    document = json.loads(polyxla(toy_path, "runtimes", "--json").stdout)
    assert [row["name"] for row in document["runtimes"]] == ["pjrt", "toy", "xrt"]
    assert document["chosen"] == "pjrt"


@pytest.mark.slow
def test_its_variable_chooses_it_and_it_trains(toy_path: str) -> None:
    done = polyxla(
        toy_path, "run", "-m", "polyxla_examples.digits", "--epochs", "6", "--json", TOY_DEVICE="1"
    )
    assert done.returncode == 0, done.stderr
    result = last_line(done.stdout)
    assert (result["runtime"], result["device"], result["world_size"]) == ("toy", "TOY", 1)
    assert result["test_accuracy"] > 0.9


@pytest.mark.slow
def test_it_passes_the_conformance_suite(toy_path: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["polyxla_testing.fixtures"]\n')
    (tmp_path / "test_toy.py").write_text(
        "from polyxla_testing import RuntimeConformance\nclass TestToy(RuntimeConformance): pass\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--polyxla-runtime",
            "toy",
            str(tmp_path),
            "--rootdir",
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": toy_path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_core_does_not_treat_the_bundled_runtimes_specially() -> None:
    import polyxla as package

    directory = Path(package.__file__).parent
    naming = {
        str(path.relative_to(directory))
        for path in directory.rglob("*.py")
        # polyxla.tpu is for runtimes: the rest of the core does not import it.
        if path.parent.name != "tpu" and ("PJRT_" in path.read_text() or "XRT_" in path.read_text())
    }
    # The table of the runtimes that the selection names with a pip command if they are not installed.
    assert naming <= {"plugin_manager.py"}
