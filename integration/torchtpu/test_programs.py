"""Programs as users of TorchTPU write them, which do not mention polyxla, on emulated TPUs.

Each trains for 20 steps; the losses are compared with those of the same program on the CPU, in one process.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
STEPS = 20
TOLERANCE = 1e-5

Train = Callable[..., list[float]]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("decoder.py", ["none"]),
        ("decoder.py", ["compile"]),
        ("resnet_block.py", ["none"]),
        pytest.param("resnet_block.py", ["compile"], marks=pytest.mark.long),
        ("characters.py", []),
    ],
)
def test_one_device_trains_as_the_cpu(
    train_on_tpu: Train, train_on_cpu: Train, program: str, arguments: list[str]
) -> None:
    _agree(train_on_tpu("v5e-1", 1, PROGRAMS / program, *arguments), _on_cpu(train_on_cpu, program))


@pytest.mark.parametrize(
    ("program", "strategy"),
    [
        pytest.param("decoder.py", "ddp", marks=pytest.mark.long),
        ("decoder.py", "fsdp"),
        pytest.param("decoder.py", "fsdp-from-host", marks=pytest.mark.slow),
        ("decoder.py", "tp"),
        pytest.param("resnet_block.py", "ddp", marks=pytest.mark.long),
    ],
)
def test_four_devices_train_as_the_cpu(
    train_on_tpu: Train, train_on_cpu: Train, program: str, strategy: str
) -> None:
    _agree(train_on_tpu("v5e-4", 4, PROGRAMS / program, strategy), _on_cpu(train_on_cpu, program))


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
    addresses, *sums = done.stdout.split()
    assert sums == ["sum=6.0"] * 4
    # No outgoing connection is given such a port before its process listens there.
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(int(address.rpartition(":")[2]) < first_given for address in addresses.split(","))


@pytest.mark.long
def test_the_quickstarts_script_trains(clean_environ: dict[str, str], tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
    (script,) = re.findall(r"^```python\n(# digits\.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "digits.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "polyxla", "run", "digits.py"],
        env={**clean_environ, "POLYXLA_EMULATE": "v5e-4"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ast.literal_eval(done.stdout)["accuracy"] > 0.9


def _on_cpu(train_on_cpu: Train, program: str) -> list[float]:
    return train_on_cpu(PROGRAMS / program, *(["cpu"] if program == "characters.py" else ["none", "cpu"]))


def _agree(losses: list[float], expected: list[float]) -> None:
    assert len(losses) == len(expected) == STEPS
    assert losses == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
