"""torch_xla loads the bridge at every import, so it must be light, and independent of the other packages."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_bridge_imports_no_other_package_and_nothing_heavy() -> None:
    code = (
        "import sys; import polyxla_bridge; print(*{name.partition('.')[0] for name in sys.modules} "
        "& {'jax', 'numpy', 'polyxla', 'polyxla_pjrt', 'polyxla_xrt', 'torch'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
