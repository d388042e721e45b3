"""What importing torch_xla changes where this runtime is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import polyxla_bridge

PRINT = "import os, torch_xla; print(os.environ.get('TPU_LIBRARY_PATH'))"


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
