"""What importing torch_xla changes where this runtime is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import polyxla_bridge

PRINT = "import os, torch_xla; print(os.environ.get('TPU_LIBRARY_PATH'))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "library"),
    [
        ({"POLYXLA_PJRT_PLUGIN": "libtpu"}, str(polyxla_bridge.LIBRARY)),
        ({"POLYXLA_PJRT_PLUGIN": "libtpu", "TPU_LIBRARY_PATH": "mine"}, str(polyxla_bridge.LIBRARY)),
        ({"TPU_LIBRARY_PATH": "mine"}, "mine"),
    ],
)
def test_a_plugin_puts_the_bridge_before_the_tpu(environ: dict[str, str], library: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINT],
        # torch_xla would ask a metadata server about a TPU.
        env={**os.environ, "PJRT_DEVICE": "CPU", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == [library], done.stderr


@pytest.mark.parametrize(
    "use", ["torch_xla.device()", pytest.param("torch.ones(2, device='xla')", marks=pytest.mark.slow)]
)
def test_a_program_that_asks_for_a_tpu_ends_at_once_where_none_is(use: str, tmp_path: Path) -> None:
    # torch_xla finds libtpu's package.
    (tmp_path / "libtpu.py").write_text("def get_library_path():\n    return 'must not be opened'\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    program = f"import torch, torch_xla\nprint('imported')\ntry: {use}\nexcept Exception: pass"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environ, "PJRT_DEVICE": "TPU", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "imported\n"), done.stderr
    assert done.stderr == (
        "polyxla: error: no TPU chip is attached to this machine (from PJRT_DEVICE=TPU). Run on a TPU VM, "
        "set POLYXLA_EMULATE=v5e-8 to emulate a TPU, or set PJRT_DEVICE=CPU to train on this machine's CPU.\n"
    )


def test_a_tpu_that_does_not_exist_is_one_line_where_torch_xla_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch_xla"],
        env={**os.environ, "POLYXLA_EMULATE": "v5e-2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("polyxla: error: ")
    assert "v5e-2" in done.stderr


def test_a_dataset_that_fails_is_an_error_in_a_plain_loop() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "programs" / "broken_dataset.py")],
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "3 ValueError: record 3 is broken",
        "0 ValueError: record 0 is broken",
        "8",
        "0 OSError: cannot be opened",
        "3 ValueError: record 3 is broken",
        "4",
    ]
