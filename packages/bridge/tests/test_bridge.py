"""torch_xla loads the bridge at every import, so it must be light, and independent of the other packages."""

from __future__ import annotations

from polyxla_testing.processes import printed_by


def test_importing_the_bridge_imports_no_other_package_and_nothing_heavy() -> None:
    code = (
        "import sys; import polyxla_bridge; print(*{name.partition('.')[0] for name in sys.modules} "
        "& {'jax', 'numpy', 'polyxla', 'polyxla_pjrt', 'polyxla_xrt', 'torch'})"
    )
    assert printed_by(code).split() == []
