"""What `import polyxla_training` gives, and what it does not import."""

from __future__ import annotations

import pytest

import polyxla_training
from polyxla_testing.processes import printed_by

HEAVY = {"torch", "torch_xla", "numpy", "rich", "tensorboard", "plotly", "jinja2", "lightning"}


def test_every_public_name_is_there() -> None:
    assert all(hasattr(polyxla_training, name) for name in polyxla_training.__all__)
    assert polyxla_training.__all__ == sorted(polyxla_training.__all__)


@pytest.mark.parametrize(
    "module", ["polyxla_training", "polyxla_training.plugin", "polyxla_training.hookspecs"]
)
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY} & set(sys.modules)))"
    assert printed_by(code) == "\n"
