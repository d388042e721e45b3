"""The bridge stands alone: it will be loaded by torch_xla, where nothing of ours needs to be installed."""

from __future__ import annotations

import subprocess
import sys


def test_it_imports_nothing_of_ours_and_nothing_heavy() -> None:
    code = (
        "import sys; import polyxla_bridge; print(*{name.partition('.')[0] for name in sys.modules} "
        "& {'jax', 'numpy', 'polyxla', 'polyxla_pjrt', 'polyxla_xrt', 'torch'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
