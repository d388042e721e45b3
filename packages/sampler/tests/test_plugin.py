"""The plugin is loaded by every command, so it must cost nothing and need nobody."""

from __future__ import annotations

import subprocess
import sys


def test_loading_it_imports_neither_torch_nor_polyxla() -> None:
    code = "import sys; import polyxla_sampler.plugin; print(*{'torch', 'polyxla'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
