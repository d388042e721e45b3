"""``polyxla check-replicas`` on a real runtime, with the MNIST model of the seeds."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla_testing import RuntimeUnderTest
from polyxla_training import check_replicas

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 200.0


class Mnist(nn.Module):
    """The model of seeds/mnist_multi.py; smooth functions can replace its layers.

    Args:
        norm: makes the layer that replaces BatchNorm2d, from the number of channels.
        pool: replaces max-pooling.
        activate: replaces ReLU.
    """

    def __init__(self, norm: Any = nn.BatchNorm2d, pool: Any = F.max_pool2d, activate: Any = F.relu) -> None:
        super().__init__()
        self.pool, self.activate = pool, activate
        self.conv1, self.bn1 = nn.Conv2d(1, 10, kernel_size=5), norm(10)
        self.conv2, self.bn2 = nn.Conv2d(10, 20, kernel_size=5), norm(20)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.bn1(self.activate(self.pool(self.conv1(images), 2)))
        hidden = self.bn2(self.activate(self.pool(self.conv2(hidden), 2)))
        hidden = self.activate(self.fc1(torch.flatten(hidden, 1)))
        return F.log_softmax(self.fc2(hidden), dim=1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return F.nll_loss(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(320, 1, 28, 28, generator=generator)
        return DataLoader(TensorDataset(images, images.flatten(1)[:, :10].argmax(1)), 64, shuffle=True)


class SyncBatchNorm2d(nn.Module):
    """torch_xla's SyncBatchNorm on flattened pixels: on images it makes a program for each channel."""

    def __init__(self, channels: int) -> None:
        from torch_xla.core.functions import SyncBatchNorm

        super().__init__()
        self.pixels = SyncBatchNorm(channels)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        last = images.movedim(1, -1)
        normal: torch.Tensor = self.pixels(last.flatten(0, -2))
        return normal.reshape(last.shape).movedim(-1, 1)


def synchronized() -> nn.Module:
    # Smooth functions: 1 and 4 replicas round the normalization differently in the 6th digit. Within ten
    # steps that makes max-pooling choose another pixel, and the models diverge. Plain torch in float32 and
    # float64 diverge in the same way.
    return Mnist(SyncBatchNorm2d, F.avg_pool2d, torch.tanh)


def plain() -> nn.Module:
    return Mnist(lambda _: nn.Identity())


def checked(module: str, environ: Mapping[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command on a module of this file."""
    command = (
        sys.executable,
        "-m",
        "polyxla",
        "check-replicas",
        *options,
        f"integration.test_check_replicas:{module}",
    )
    return subprocess.run(
        command,
        env={**os.environ, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [plain, pytest.param(synchronized, marks=pytest.mark.torch_xla("torch_xla's SyncBatchNorm"))],
)
def test_the_mnist_model_trains_equally_on_several_replicas(runtime: RuntimeUnderTest, make: Any) -> None:
    result = check_replicas(make, runtime=runtime.name)
    assert result.within, str(result)
    assert result.difference > 0
    assert result.warnings == ()


@pytest.mark.long
def test_batch_norm_is_reported_and_makes_a_difference(runtime: RuntimeUnderTest) -> None:
    options = ("--runtime", runtime.name, "--devices", "2", "--json")
    done = checked("Mnist", runtime.environ, *options)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert (report["devices"], report["steps"], report["within"]) == (2, 10, False)
    assert report["difference"] > report["tolerance"]
    assert "not comparable: bn1 (BatchNorm2d), bn2 (BatchNorm2d) normalises" in done.stderr


@pytest.mark.slow
def test_a_summed_loss_is_found(runtime: RuntimeUnderTest) -> None:
    result = check_replicas(functools.partial(_Summed, 4, 1), runtime=runtime.name, devices=2, steps=2)
    assert not result.within
    assert result.worst in {"weight", "bias"}


@pytest.mark.slow
@pytest.mark.emulated_tpu
def test_a_tpus_products_are_compared_with_exact_ones() -> None:
    options = ("--numerics", "--steps", "2", "--tolerance", "0.01")
    done = checked("plain", {"POLYXLA_EMULATE": "v5e-1"}, *options)
    assert done.returncode == 0, done.stderr
    how = "2 steps with a TPU's products of float32 and with exact ones: the largest relative difference is"
    assert done.stdout.startswith(how)
    (difference,) = re.findall(r"difference is ([\d.e-]+),", done.stdout)
    assert float(difference) > 1e-5


class _Summed(nn.Linear):
    """Its gradients grow with the batch, and each replica has only a share of the batch."""

    example_input_array = torch.zeros(1, 4)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self(batch).square().sum()
        return loss
