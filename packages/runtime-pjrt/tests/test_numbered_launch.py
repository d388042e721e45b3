"""Plain torch_xla programs: results are keyed by ordinal, whatever the order of the processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "launch_by_ordinal.py"


def test_a_plain_launch_returns_results_by_ordinal() -> None:
    # In a process of its own: importing torch_xla sets variables.
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "{0: '0', 1: '1', 2: '2', 3: '3'}\n"
