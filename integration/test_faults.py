"""Two minutes of ``integration/faults.py``: `nox -s faults -- --minutes 60` runs an hour of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.pjrt, pytest.mark.timeout(900)]
FAULTS = Path(__file__).parent / "faults.py"


def test_a_fault_at_random_ends_in_success_or_in_a_named_error_and_leaves_nothing() -> None:
    command = [sys.executable, str(FAULTS), "--minutes", "2", "--seed", "11", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    outcomes = [entry["outcome"] for entry in json.loads(done.stdout)["rounds"] if entry["fault"] != "none"]
    struck = [outcome for outcome in outcomes if outcome != "early"]
    assert len(struck) >= max(3, len(outcomes) / 2), done.stderr
