"""Fixtures of these tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from polyxla_tools.doctor.variables import PREFIXES

TIMEOUT_S = 120.0


@pytest.fixture
def environ() -> dict[str, str]:
    """This environment without the variables that are examined."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}


@pytest.fixture
def doctor(environ: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``polyxla doctor`` in a process of its own, without variables of the machine."""

    def run(
        *options: str, before: tuple[str, ...] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*before, sys.executable, "-m", "polyxla", "doctor", *options],
            env=environ | variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    return run
