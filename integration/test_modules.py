"""torch's modules on a device of torch_xla, and on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.pjrt

PROGRAM = Path(__file__).parent / "programs" / "modules.py"
TIMEOUT_S = 1500
DIFFERENT = {"LPPool1d", "LPPool2d", "LPPool3d", "LogSoftmax", "Softmax", "Softmin"}
"""Modules with samples that differ: gradients that are NaN on the CPU, and 0 where relu loses NaN; and a
dimension of a tensor without dimensions, which torch_xla refuses."""


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
def test_modules_compute_what_they_compute_on_the_cpu() -> None:
    environ = os.environ | {"POLYXLA_EMULATE": "v5e-1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["samples"] > 500
    assert found["wrong"].keys() == DIFFERENT, found["wrong"]


LAZY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.LazyLinear(3), (2, 4)),
    "convolution": (lambda: nn.LazyConv2d(3, 2), (2, 3, 5, 5)),
    "norm": (nn.LazyBatchNorm1d, (2, 4)),
}


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_module_may_be_moved_before_its_first_call(name: str) -> None:
    make, shape = LAZY[name]
    of_xla, of_cpu = (nn.Sequential(make(), nn.Flatten()).to(device) for device in ("xla", "cpu"))
    x = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)
    of_xla(x.to("xla"))
    of_cpu(x)
    of_cpu.load_state_dict(of_xla.state_dict())
    torch.testing.assert_close(of_xla(x.to("xla")).cpu(), of_cpu(x), rtol=1e-4, atol=1e-4)
    assert {type(parameter) for parameter in of_xla.parameters()} == {nn.Parameter}
    assert {parameter.device.type for parameter in of_xla.parameters()} == {"xla"}
