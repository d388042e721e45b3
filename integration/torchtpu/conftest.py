"""Runs programs as users of TorchTPU write them, and reads the losses that they print."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Train = Callable[..., list[float]]


@pytest.fixture(scope="session")
def reference() -> Train:
    """Returns the losses of a program on the CPU, in one process, which it computes once."""

    @functools.cache
    def losses(program: Path, *arguments: str) -> list[float]:
        return _losses([sys.executable, str(program), *arguments], None)

    return losses


@pytest.fixture
def train(clean_environ: dict[str, str]) -> Train:
    """Returns the losses of a program on an emulated TPU: by python for one device, else by torchrun."""

    def run(tpu: str, devices: int, program: Path, *arguments: str) -> list[float]:
        launcher = [sys.executable]
        if devices > 1:
            launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(devices)]
        return _losses([*launcher, str(program), *arguments], {**clean_environ, "POLYXLA_EMULATE": tpu})

    return run


def _losses(command: list[str], environ: dict[str, str] | None) -> list[float]:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss ")]
