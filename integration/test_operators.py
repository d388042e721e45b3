"""torch's own samples of its operators, forward and backward, on an emulated TPU and on the CPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "programs" / "operators.py"
sys.path.append(str(PROGRAM.parent))
from operators import Numbers, difference  # noqa: E402

pytestmark = pytest.mark.pjrt

EMULATED, OWN_CLIENT = {"POLYXLA_EMULATE": "v5e-1"}, {"PJRT_DEVICE": "CPU"}
ON_BRIDGE = {"PJRT_DEVICE": "CPU_POLYXLA"}
TOLERANCE = 1e-5
"""XLA adds in another order than torch."""

OPERATORS = """
abs acos add addmm aminmax baddbmm bmm cat ceil chunk clamp constant_pad_nd cos diag diagonal_scatter dot
einsum erf exp expand flip floor fmax fmin fmod gather index_put isclose kthvalue log log1p log_softmax
lu lu_solve masked_fill masked_scatter matmul max.binary max.reduction_no_dim maximum min.binary
min.reduction_no_dim minimum mm mul mv native_layer_norm nn.functional.adaptive_avg_pool2d
nn.functional.adaptive_max_pool2d nn.functional.avg_pool1d nn.functional.conv1d nn.functional.conv2d
nn.functional.conv_transpose2d nn.functional.cross_entropy nn.functional.embedding nn.functional.glu
nn.functional.group_norm nn.functional.hardsigmoid nn.functional.hardtanh
nn.functional.interpolate.bilinear nn.functional.interpolate.nearest nn.functional.leaky_relu
nn.functional.linear nn.functional.mish nn.functional.normalize nn.functional.pad.reflect
nn.functional.prelu nn.functional.relu6 nn.functional.rms_norm nn.functional.silu nn.functional.softmin
outer permute pow qr rsqrt scatter scatter_add scatter_reduce.amax scatter_reduce.amin scatter_reduce.mean
scatter_reduce.prod scatter_reduce.sum
select_scatter sigmoid sign sin softmax sort split sqrt square stack std_mean sub take tanh topk
true_divide var_mean where
"""
"""Operators all of whose samples are right on an emulated TPU with torch_xla, except for `NAN_GRADIENTS`."""
NAN_GRADIENTS = {"scatter_reduce.amax[4]", "scatter_reduce.amin[4]"}
"""Samples whose result is NaN: the gradient is 0, where the CPU divides 0 by 0."""
BOTH_WRONG: set[str] = {
    "max.reduction_with_dim[4]",
    "min.reduction_with_dim[4]",
    "nn.functional.gelu[4]",
    "nn.functional.max_pool1d[4]",
    "nn.functional.max_pool2d[4]",
    "nn.functional.max_pool3d[4]",
    "nn.functional.max_unpool1d[4]",
    "nn.functional.max_unpool1d.grad[4]",
    "nn.functional.max_unpool2d[4]",
    "nn.functional.max_unpool2d.grad[4]",
    "nn.functional.max_unpool3d[4]",
    "nn.functional.max_unpool3d.grad[4]",
}
"""Samples with NaN that neither client computes as the CPU does, with different results.

torch_xla's own client loses NaN, and the programs' indices are wrong with both.
"""


def run(directory: Path, environ: dict[str, str], *names: str) -> int:
    """Compute the operators that have no file yet; return how often the process was ended by one of them."""
    command = [sys.executable, str(PROGRAM), str(directory), *names]
    for ends in itertools.count():
        done = subprocess.run(
            command, env=os.environ | environ, capture_output=True, text=True, timeout=3600, check=False
        )
        if done.returncode >= 0:
            assert done.returncode == 0, done.stderr
            return ends
    raise AssertionError


def compared(directory: Path) -> Iterator[tuple[str, Numbers, Numbers]]:
    """Return the name of each sample, and what the device and the CPU computed for it."""
    for path in sorted(directory.iterdir()):
        outcome = torch.load(path)
        for number, (ours, expected) in enumerate(zip(*outcome, strict=True) if len(outcome) == 2 else ()):
            yield f"{path.stem}[{number}]", ours, expected


def test_common_operators_compute_what_the_cpu_computes(tmp_path: Path) -> None:
    assert run(tmp_path, EMULATED, *OPERATORS.split()) == 0
    found = {name: difference(ours, expected, TOLERANCE) for name, ours, expected in compared(tmp_path)}
    assert len(found) > 300
    assert {name for name, text in found.items() if text} == NAN_GRADIENTS


@pytest.mark.long
@pytest.mark.parametrize("environ", [EMULATED, ON_BRIDGE], ids=["emulated", "cpu"])
def test_the_bridge_is_wrong_nowhere_alone(tmp_path: Path, environ: dict[str, str]) -> None:
    """Where torch_xla's own client and the bridge differ, the bridge computes what the CPU computes."""
    ours, theirs = tmp_path / "bridge", tmp_path / "own"
    for directory, variables in ((ours, environ), (theirs, OWN_CLIENT)):
        directory.mkdir()
        run(directory, variables)
    own = {name: numbers for name, numbers, _ in compared(theirs)}
    wrong = {
        name: difference(numbers, own[name], TOLERANCE)
        for name, numbers, expected in compared(ours)
        if name in own and difference(numbers, expected, TOLERANCE)
    }
    assert {name: text for name, text in wrong.items() if text and name not in BOTH_WRONG} == {}
