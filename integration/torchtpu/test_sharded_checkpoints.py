"""Runs of divided modules resume from their shards, to the same bits, also in another division."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyxla_testing.processes import kill_group_when
from polyxla_training import CheckpointFolder, load

PROGRAM = Path(__file__).parent.parent / "programs" / "train_divided.py"
TIMEOUT_S = 400.0
STEPS = 8
"""Updates in an epoch of four replicas."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(clean_environ: dict[str, str]) -> Iterator[Start]:
    """Starts the program on an emulated v5e-8, in a session of its own; ends what is left of it."""
    started: list[subprocess.Popen[str]] = []

    def run(directory: Path, mesh: Any, devices: int, epochs: int) -> subprocess.Popen[str]:
        arguments = [directory, json.dumps(mesh), devices, epochs, directory / "first.safetensors"]
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *map(str, arguments)],
            env={**clean_environ, "POLYXLA_EMULATE": "v5e-8"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def train(start: Start) -> Callable[..., str]:
    """Runs the program to its end; returns what it has printed to standard error."""

    def run(directory: Path, mesh: Any, devices: int, epochs: int, code: int = 0) -> str:
        process = start(directory, mesh, devices, epochs)
        _, printed = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == code, printed[-5000:]
        return printed

    return run


def newest(directory: Path) -> tuple[int, Path]:
    entry = CheckpointFolder(directory).latest()
    assert entry is not None
    return entry.step, Path(str(entry.path))


def assert_same(found: Any, expected: Any) -> None:
    """Compare modules and optimizers, bit for bit."""
    assert found["module"].keys() == expected["module"].keys()
    for name, value in expected["module"].items():
        assert torch.equal(found["module"][name], value), name
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    moments = expected["optimizer"]["state"]
    assert found["optimizer"]["state"].keys() == moments.keys()
    for number, values in moments.items():
        for key, value in values.items():
            assert torch.equal(found["optimizer"]["state"][number][key], value), (number, key)


@pytest.mark.timeout(3 * TIMEOUT_S)
def test_a_run_killed_while_it_saves_ends_with_the_same_bits(
    start: Start, train: Callable[..., str], tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, "fsdp", 4, 2)
    process = start(killed, "fsdp", 4, 2)

    def is_writing() -> bool:
        """Return whether there is a checkpoint, and the next one is being written."""
        assert process.poll() is None, process.communicate()[1][-5000:]
        return any(killed.glob("step-*.shards")) and any(killed.glob(".*-directory/shard-*.safetensors"))

    kill_group_when(is_writing, "a checkpoint, and a part of the next one", process.pid, TIMEOUT_S)
    process.communicate(timeout=TIMEOUT_S)
    assert list(killed.glob(".*-directory"))
    step, path = newest(killed)
    assert 0 < step < 2 * STEPS
    load(path)
    printed = train(killed, "fsdp", 4, 2)
    assert f"resumed from {path}: epoch" in printed
    assert newest(killed)[0] == newest(whole)[0] == 2 * STEPS
    assert_same(load(newest(killed)[1]), load(newest(whole)[1]))
    assert not list(killed.glob(".*"))


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_other_divisions_resume_it(train: Callable[..., str], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    train(saved, {"fsdp": 2, "tp-plan": 2}, 4, 1)
    expected = load(newest(saved)[1])
    for name, mesh, devices in (("two", "fsdp", 2), ("alone", "auto", 1)):
        directory = Path(shutil.copytree(saved, tmp_path / name))
        train(directory, mesh, devices, 1)
        assert_same(load(directory / "first.safetensors"), expected)


@pytest.mark.long
@pytest.mark.timeout(4 * TIMEOUT_S)
def test_eight_replicas_then_four_then_one(train: Callable[..., str], tmp_path: Path) -> None:
    for mesh, devices, epochs in ((({"ddp": 2, "fsdp": 4}), 8, 1), ("fsdp", 4, 2), ("auto", 1, 3)):
        before = load(newest(tmp_path)[1]) if devices < 8 else None
        train(tmp_path, mesh, devices, epochs)
        if before is not None:
            assert_same(load(tmp_path / "first.safetensors"), before)
        assert load(newest(tmp_path)[1])["epoch"] == epochs


@pytest.mark.long
@pytest.mark.timeout(4 * TIMEOUT_S)
def test_a_file_and_a_damaged_shard(train: Callable[..., str], tmp_path: Path) -> None:
    train(tmp_path, "auto", 1, 1)
    path = newest(tmp_path)[1]
    assert path.is_file()
    expected = load(path)
    train(tmp_path, "fsdp", 2, 2)
    assert_same(load(tmp_path / "first.safetensors"), expected)
    assert newest(tmp_path)[1].is_dir()
    # Its header is intact, so ordinal 0 chooses it, and the replica that reads the tensors finds the damage.
    shard = newest(tmp_path)[1] / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    printed = train(tmp_path, "fsdp", 2, 3, code=1)
    assert "shard-00001.safetensors' is damaged" in printed
    # A file that is missing is seen before: the checkpoint before it is taken.
    shard.unlink()
    printed = train(tmp_path, "fsdp", 2, 2)
    assert "shard-00001.safetensors is missing; loading the checkpoint before it" in printed
    assert "resumed from" in printed
