"""Programs of this suite start from a warm process, where the runtime can prepare one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyxla_testing import RuntimeUnderTest


def test_a_program_starts_with_its_framework_imported(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    script = tmp_path / "first_line.py"
    script.write_text("import sys\nprint('torch' in sys.modules)\n")
    done = runtime.run(str(script))
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert "this start is cold" not in done.stderr
