"""Programs as users of TorchTPU write them, without a word of polyxla, on emulated TPUs.

Each trains for 20 steps; the losses are compared with those of the same program on the CPU, in one process.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
STEPS = 20
TOLERANCE = 1e-5

Train = Callable[..., list[float]]


@pytest.fixture(scope="session")
def reference() -> Callable[[str], list[float]]:
    """Returns the losses of a program on the CPU, which it computes once."""
    known: dict[str, list[float]] = {}

    def losses(program: str) -> list[float]:
        if program not in known:
            arguments = ["cpu"] if program == "characters.py" else ["none", "cpu"]
            known[program] = _losses([sys.executable, str(PROGRAMS / program), *arguments], {})
        return known[program]

    return losses


@pytest.fixture
def train(clean_environ: dict[str, str]) -> Train:
    """Returns the losses of a program on an emulated TPU: by python for one device, else by torchrun."""

    def run(tpu: str, devices: int, program: str, *arguments: str) -> list[float]:
        launcher = [sys.executable]
        if devices > 1:
            launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(devices)]
        environ = {**clean_environ, "POLYXLA_EMULATE": tpu}
        return _losses([*launcher, str(PROGRAMS / program), *arguments], environ)

    return run


def _losses(command: list[str], environ: dict[str, str]) -> list[float]:
    done = subprocess.run(
        command, env=environ or None, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss ")]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("decoder.py", ["none"]),
        ("decoder.py", ["compile"]),
        ("resnet_block.py", ["none"]),
        ("resnet_block.py", ["compile"]),
        ("characters.py", []),
    ],
)
def test_one_device_trains_as_the_cpu(
    train: Train, reference: Callable[[str], list[float]], program: str, arguments: list[str]
) -> None:
    _agree(train("v5e-1", 1, program, *arguments), reference(program))


@pytest.mark.parametrize(
    ("program", "strategy"),
    [("decoder.py", "ddp"), ("decoder.py", "fsdp"), ("decoder.py", "tp"), ("resnet_block.py", "ddp")],
)
def test_four_devices_train_as_the_cpu(
    train: Train, reference: Callable[[str], list[float]], program: str, strategy: str
) -> None:
    _agree(train("v5e-4", 4, program, strategy), reference(program))


def test_processes_of_torch_multiprocessing_train(
    clean_environ: dict[str, str],
) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "spawned.py")],
        env={**clean_environ, "POLYXLA_EMULATE": "v4-8"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split()) == ["sum=6.0"] * 4


def _agree(losses: list[float], expected: list[float]) -> None:
    assert len(losses) == len(expected) == STEPS
    assert losses == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
