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

from polyxla_bridge.table.table import recorded

PROGRAM = Path(__file__).parent / "programs" / "surface.py"
CHECKS = re.findall(r"^def (\w+)\(\) -> None:$", PROGRAM.read_text().partition("def main")[0], re.MULTILINE)


def test_the_functions_of_torch_tpu_work_and_none_of_the_tables_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, "POLYXLA_EMULATE": "v5e-1", "POLYXLA_BRIDGE_CALLS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # The traceback of each check, or nothing.
    outcomes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert outcomes == dict.fromkeys(CHECKS, "")
    called, missing = recorded(tmp_path)
    assert {"Client_Create", "Client_Compile", "Device_ClearMemoryStats"} < called
    assert missing == set()
