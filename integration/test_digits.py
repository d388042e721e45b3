"""The main example: real data, trained to the accuracy that the documentation promises."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from polyxla_examples.digits import DigitsNet, datasets
from polyxla_testing import RuntimeUnderTest
from polyxla_training import Trainer

FIELDS = ["runtime", "device", "world_size", "epochs", "steps", "test_accuracy", "seconds"]


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


@pytest.mark.slow
def test_digits_reaches_its_accuracy(runtime: RuntimeUnderTest) -> None:
    done = runtime.run("-m", "polyxla_examples.digits", "--json")
    result = last_line(done)
    assert list(result) == FIELDS
    assert result["runtime"] == runtime.name
    assert result["test_accuracy"] >= 0.97
    # 1437 images, divided among all replicas, in batches of 32 without the last incomplete one.
    assert result["steps"] == result["epochs"] * (math.ceil(1437 / result["world_size"]) // 32)
    assert "epoch 15/15" in done.stderr


@pytest.mark.long
def test_digits_without_variables_prints_the_chosen_runtime() -> None:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PJRT_", "XRT_", "POLYXLA_"))
    }
    command = [
        sys.executable,
        "-m",
        "polyxla",
        "run",
        "-m",
        "polyxla_examples.digits",
        "--epochs",
        "5",
        "--json",
    ]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=300, check=False)
    assert last_line(done)["test_accuracy"] > 0.9
    assert done.stderr.count("polyxla: runtime pjrt: the CPU, because no TPU is attached") == 1


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["inline", pytest.param("spawn", marks=pytest.mark.long)])
def test_digits_trains_the_callers_module(runtime: RuntimeUnderTest, start_method: Any) -> None:
    torch.manual_seed(0)
    train, test = datasets()
    loader = DataLoader(train, 32, shuffle=True, drop_last=True)
    module = DigitsNet(0.01)
    trainer = Trainer(
        max_epochs=3, devices=1, runtime=runtime.name, start_method=start_method, log_dir=None, progress=False
    )
    trainer.fit(module, loader)
    assert next(module.parameters()).device.type == "cpu"
    images, labels = test.tensors
    accuracy = (module(images).argmax(dim=1) == labels).float().mean().item()
    assert accuracy > 0.9
    # The runtime computes on its device what torch computes here.
    assert trainer.test(module, DataLoader(test, 64))["test_accuracy"] == pytest.approx(accuracy, abs=0.005)
