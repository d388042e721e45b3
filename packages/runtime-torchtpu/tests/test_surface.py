"""TorchTPU's own functions on one emulated device: memory, streams, events, random numbers, dtypes, copies.

Which functions of PJRT's table they reach is recorded, too. integration/ records those of the whole suite.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polyxla_bridge.table.table import recorded

PROGRAM = Path(__file__).parent / "programs" / "surface.py"
CHECKS = re.findall(r"^def (\w+)\(\) -> None:$", PROGRAM.read_text().partition("def main")[0], re.MULTILINE)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which `outcomes` records functions of the table."""
    return tmp_path_factory.mktemp("calls")


@pytest.fixture(scope="module")
def outcomes(calls: Path) -> dict[str, str]:
    """The traceback of each check that failed, all made by one process."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, "POLYXLA_EMULATE": "v5e-1", "POLYXLA_BRIDGE_CALLS": str(calls)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_a_function_of_torch_tpu_works(outcomes: dict[str, str], check: str) -> None:
    assert outcomes[check] == ""


def test_no_function_of_the_table_is_missing(outcomes: dict[str, str], calls: Path) -> None:
    called, missing = recorded(calls)
    assert {"Client_Create", "Client_Compile", "Device_ClearMemoryStats"} < called
    assert missing == set()
