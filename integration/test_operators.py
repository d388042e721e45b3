"""torch's own samples of its operators, forward and backward, on an emulated TPU and on the CPU."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import polyxla
from polyxla import Replica

PROGRAM = Path(__file__).parent / "programs" / "operators.py"
sys.path.append(str(PROGRAM.parent))
from operators import ANY_SIZE, TRANSFORMS, Numbers, difference, direction  # noqa: E402

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
nn.functional.adaptive_max_pool2d nn.functional.avg_pool1d nn.functional.avg_pool2d nn.functional.celu
nn.functional.conv1d nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.cross_entropy
nn.functional.elu nn.functional.embedding nn.functional.glu nn.functional.group_norm
nn.functional.hardsigmoid nn.functional.hardtanh
nn.functional.interpolate.bilinear nn.functional.interpolate.nearest nn.functional.leaky_relu
nn.functional.linear nn.functional.mish nn.functional.normalize nn.functional.pad.reflect
nn.functional.prelu nn.functional.relu6 nn.functional.rms_norm nn.functional.selu nn.functional.silu
nn.functional.softmin norm.inf outer permute pow qr rsqrt scatter scatter_add scatter_reduce.amax
scatter_reduce.amin scatter_reduce.mean scatter_reduce.prod scatter_reduce.sum select_scatter
sigmoid sign sin softmax sort split sqrt square stack std_mean sub take tanh topk true_divide var_mean where
"""
"""Operators all of whose samples are right on an emulated TPU with torch_xla, except for `NAN_GRADIENTS`."""
NAN_GRADIENTS = {
    *("scatter_reduce.amax[4]", "scatter_reduce.amin[4]"),
    *("nn.functional.hardtanh[4]", "nn.functional.relu6[3]"),
}
"""Samples whose result is NaN. The gradient of the first two is 0, where the CPU divides 0 by 0. That of the
others is the result's, as with CUDA; where the CPU computes several elements at once, it has 0."""
DIFFERENT: dict[str, set[str]] = {
    "--vjp": NAN_GRADIENTS,
    "--jvp": {
        *("max.reduction_no_dim[2]", "min.reduction_no_dim[2]", "nn.functional.prelu[4]"),
        *("nn.functional.hardtanh[4]", "nn.functional.relu6[3]"),
    },
    "--vmap": set(),
}
"""Such samples that torch.func differentiates, or maps: all have NaN."""
BOTH_WRONG: set[str] = {
    "amax[4]",
    "amin[4]",
    "masked.amax[4]",
    "masked.amin[4]",
    "max.reduction_with_dim[4]",
    "min.reduction_with_dim[4]",
    "nn.functional.conv_transpose3d[2]",
    "nn.functional.gelu[4]",
    "nn.functional.hardtanh[4]",
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
"""Samples that neither client computes as the CPU does, with different results.

All but one have NaN: torch_xla's own client loses NaN, and the programs' indices, or gradients, are wrong
with both. Both round the sums of the convolution.
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


def operators_of(samples: Iterable[str]) -> set[str]:
    """Return the operators of samples with these names."""
    return {name.partition("[")[0] for name in samples}


@pytest.mark.long
def test_common_operators_compute_what_the_cpu_computes(tmp_path: Path) -> None:
    assert run(tmp_path, EMULATED, *OPERATORS.split()) == 0
    found = {name: difference(ours, expected, TOLERANCE) for name, ours, expected in compared(tmp_path)}
    assert operators_of(found) == {*OPERATORS.split()}
    assert len(found) > 300
    assert {name for name, text in found.items() if text} == NAN_GRADIENTS


@pytest.mark.long
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_of_operators_computes_what_the_cpu_computes(transform: str, tmp_path: Path) -> None:
    assert run(tmp_path, EMULATED, transform, *OPERATORS.split()) == 0
    found = {name: difference(ours, expected, TOLERANCE) for name, ours, expected in compared(tmp_path)}
    assert operators_of(found) == {*OPERATORS.split()}
    assert {name for name, text in found.items() if text} == DIFFERENT[transform]


IN_LIBRARY = """
nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d
nn.functional.conv_transpose2d nn.functional.conv_transpose3d nn.functional.max_pool1d
nn.functional.max_pool2d nn.functional.linear nn.functional.bilinear addmm matmul sum
nn.functional.layer_norm
"""
"""Operators, forward or backward, for which programs on the CPU call the bridge's C library."""
WITHOUT_LIBRARY = {
    *("nn.functional.conv_transpose3d[2]", "nn.functional.layer_norm[2]", "nn.functional.max_pool2d[3]"),
    *("sum[1]", "sum[2]"),
}
"""Samples of these that differ in the same way if XLA computes all: torch_xla refuses or rounds them."""


@pytest.mark.slow
def test_the_bridges_library_computes_what_the_cpu_computes(tmp_path: Path) -> None:
    assert run(tmp_path, EMULATED, ANY_SIZE, *IN_LIBRARY.split()) == 0
    found = {name: difference(ours, expected, TOLERANCE) for name, ours, expected in compared(tmp_path)}
    assert operators_of(found) == {*IN_LIBRARY.split()}
    assert len(found) > 50
    assert {name for name, text in found.items() if text} <= BOTH_WRONG | WITHOUT_LIBRARY


def _cube(x: torch.Tensor) -> torch.Tensor:
    return (x[:3, None, None] * x[1:5, None] + x[:5]).reshape(3, 4, 5)


def _matrices(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.reshape(2, 3), x.reshape(2, 3).square() + 1]).reshape(1, 2, 2, 3)


def _product(u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> torch.Tensor:
    return (u * s[..., None, :]) @ vh


def _tripled(x: torch.Tensor) -> torch.Tensor:
    torch.as_strided(x, (2,), (2,), 1).mul_(3)
    return x


def _complex(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x[:3], x[3:] + 5)


def _parts(z: torch.Tensor) -> torch.Tensor:
    return torch.cat([z.real.flatten(), z.imag.flatten()])


VALUES = torch.tensor([-3.0, -1.0, -0.1, 0.0, 0.5, 2.0])
REPLACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elu": lambda x: F.elu(x, 2.0),
    "elu-in-place": lambda x: F.elu(x * 1, 2.0, inplace=True),
    "celu": lambda x: F.celu(x, 2.0),
    "celu-in-place": lambda x: F.celu(x * 1, 2.0, inplace=True),
    "selu": F.selu,
    "selu-in-place": lambda x: F.selu(x * 1, inplace=True),
    "norm": lambda x: x.norm(math.inf),
    "norm-negative": lambda x: (x + 4).norm(-math.inf),
    "norm-dim": lambda x: torch.norm(x.reshape(2, 3), math.inf, 1),
    "norm-dims": lambda x: torch.norm(x.reshape(2, 3), math.inf, (0, 1), keepdim=True),
    "norm-finite": lambda x: torch.norm(x.reshape(2, 3), 3, 1, keepdim=True),
    "norm-dtype": lambda x: torch.norm(x, math.inf, dtype=torch.float64),
    "avg-pool": lambda x: F.avg_pool2d(x.reshape(1, 2, 3), 2, 1, divisor_override=3),
    "avg-pool-padded": lambda x: F.avg_pool2d(
        x.reshape(1, 1, 2, 3), (2, 3), (2, 1), 1, count_include_pad=False, divisor_override=5
    ),
    "avg-pool-ceil": lambda x: F.avg_pool2d(x.reshape(1, 2, 3), 2, 2, 1, True, True, 1),
    "avg-pool-3d": lambda x: F.avg_pool3d(
        x.reshape(1, 2, 1, 3), (2, 1, 2), 2, ceil_mode=True, divisor_override=3
    ),
    "max-pool-dilated": lambda x: F.max_pool2d(x.reshape(1, 2, 3), (1, 2), (2, 1), 0, (1, 2)),
    "max-pool-dilated-3d": lambda x: F.max_pool3d(_cube(x)[None], 2, 1, 1, (1, 2, 1), ceil_mode=True),
    "max-pool-plain": lambda x: F.max_pool2d(x.reshape(1, 2, 3), 2, 1),
    "diagonal": lambda x: torch.diagonal(_cube(x), 1),
    "diagonal-last": lambda x: torch.diagonal(_cube(x), -1, 2, 1),
    "diagonal-einsum": lambda x: torch.einsum("iij->j", _cube(x)[:, :3]),
    "diagonal-scatter": lambda x: torch.diagonal_scatter(_cube(x), torch.diagonal(_cube(x * 2), 1), 1),
    "amax": lambda x: x.reshape(2, 3) - x.reshape(2, 3).amax(),
    "amin-keepdim": lambda x: x.reshape(2, 3) * torch.amin(x.reshape(2, 3), dim=(), keepdim=True),
    "amax-dim": lambda x: x.reshape(2, 3).amax(1),
    "amax-infinite": lambda x: (
        x.reshape(2, 3).amax(1) + (x.detach() * 0 - math.inf).reshape(2, 3).amax(1)
    ).exp(),
    "max-infinite": lambda x: (x.detach() - math.inf).max().exp() + x.max() + x.reshape(2, 3).max(1)[0].sum(),
    "min-infinite": lambda x: (
        (x.detach() + math.inf).min().reciprocal() + x.min() + x.reshape(2, 3).min(1)[0].sum()
    ),
    "max-half": lambda x: (x.half() * 2**-23).max().float() * 2**23,
    "amax-ties": lambda x: torch.cat([x, x, x - 1]).amax(),
    "sum-over-none": lambda x: x.reshape(2, 3).sum(dim=()),
    "mean-over-none": lambda x: x.reshape(2, 3).mean(dim=[], keepdim=True),
    "std-over-none": lambda x: torch.std(x.detach().reshape(2, 3), dim=(), keepdim=True) * x,
    "var-mean-over-none": lambda x: torch.stack(torch.var_mean(x.reshape(2, 3), dim=())),
    "logsumexp-over-none": lambda x: torch.logsumexp(x.reshape(2, 3), dim=(), keepdim=True),
    "vector-norm-over-none": lambda x: torch.linalg.vector_norm(x.reshape(2, 3), 3, dim=()),
    "roll-empty": lambda x: x[:0].reshape(0, 2).roll((1, 1), (0, 1)).sum() + x.roll(2),
    "logsumexp-infinite": lambda x: (
        torch.logsumexp(torch.stack([x.detach() * 0 - math.inf, x]).T, 1)
        + torch.logsumexp(torch.stack([x.detach() * 0 + math.inf, x]).T, 1, keepdim=True)
        .squeeze(1)
        .reciprocal()
    ),
    "vector-norm-infinite": lambda x: (
        torch.linalg.vector_norm(x.detach() - math.inf, math.inf).reciprocal()
        + torch.linalg.vector_norm(x.reshape(2, 3), -math.inf, 1)
    ),
    "nan-to-num": lambda x: (x * 0 + math.inf).bfloat16().nan_to_num().float() + x,
    "complex-abs": lambda x: _complex(x).abs(),
    "complex-quotient": lambda x: _parts(_complex(x) / (_complex(x * 2) + 1j)),
    "complex-quotient-by-real": lambda x: _parts(_complex(x) / (x[:3] + 5)),
    "complex-quotient-by-number": lambda x: _parts(_complex(x) / 2.5 + x[:3] / (1 + 2j)),
    "complex-quotient-in-place": lambda x: _parts((_complex(x) * 1).div_(_complex(x) + 1)),
    "complex-quotient-within-torch": lambda x: _parts(torch.trapezoid(_complex(x), _complex(x * 2))),
    "complex-tanh": lambda x: _parts(_complex(x / 4).tanh() + _complex(x / 4).sigmoid()),
    "complex-einsum": lambda x: _parts(torch.einsum("i,j->ij", _complex(x), _complex(x * 2))),
    "complex-inverse": lambda x: _parts(torch.linalg.inv(torch.diag_embed(_complex(x)) + x[:3, None])),
    "quotient-by-number": lambda x: x / 2.5 + (x * 1).div_(3) + (x.long() / 3).detach() + x.bfloat16() / 4,
    "quotient-rounded": lambda x: (
        torch.div(x, 0.3, rounding_mode="floor") + torch.div(x, x.detach() + 9, rounding_mode="trunc") + x
    ),
    "tanh": lambda x: x.tanh() + x.sigmoid(),
    "einsum": lambda x: torch.einsum("i,j->ij", x, x * 2),
    "hardtanh": lambda x: F.hardtanh(x, -1, 0.5),
    "relu6": F.relu6,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": lambda x: F.hardswish(x * 2) + F.hardswish(x),
    "svd": lambda x: torch.linalg.svdvals(_matrices(x)).sum(-1),
    "svd-vectors": lambda x: _product(*torch.linalg.svd(_matrices(x), full_matrices=False)),
    "nuclear-norm": lambda x: torch.linalg.matrix_norm(_matrices(x), "nuc"),
    "inverse": lambda x: torch.linalg.inv_ex(_matrices(x)[..., :2])[0],
    "pdist": lambda x: F.pdist(x.reshape(3, 2), 0) + F.pdist(x.reshape(3, 2), math.inf),
    "pdist-finite": lambda x: F.pdist(x.reshape(3, 2), 3),
    "nll-loss": lambda x: F.cross_entropy(x, torch.tensor(1, device=x.device), 1 + x.detach().abs()),
    "nll-loss-none": lambda x: F.cross_entropy(x, torch.tensor(1, device=x.device), reduction="none"),
    "as-strided-scatter": lambda x: torch.as_strided_scatter(x * 2, x[:4].reshape(2, 2), (2, 2), (1, 3), 1),
    "as-strided-in-place": lambda x: _tripled(x * 1),
    "avg-pool-plain": lambda x: F.avg_pool2d(x.reshape(1, 2, 3), 2, 1, 1, count_include_pad=False),
}


def _square(x: torch.Tensor) -> torch.Tensor:
    return x[:4].reshape(2, 2)


def _images(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x * 2, x[:4]]).reshape(16, 1, 1)


SAME_HASH: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
    "index-add": [
        lambda x: _square(x * 2).index_add(0, torch.tensor([1, 1], device=x.device), _square(x)),
        lambda x: _square(x * 2).index_add(1, torch.tensor([1, 1], device=x.device), _square(x)),
        lambda x: _square(x * 2).index_add(-1, torch.tensor([1, 1], device=x.device), _square(x), alpha=3),
    ],
    "index-copy": [
        lambda x: _square(x * 2).index_copy(0, torch.tensor([1, 0], device=x.device), _square(x)),
        lambda x: _square(x * 2).index_copy(1, torch.tensor([1, 0], device=x.device), _square(x)),
    ],
    "index-add-in-place": [
        lambda x: _square(x * 2).index_add_(0, torch.tensor([1, 1], device=x.device), _square(x)),
        lambda x: _square(x * 2).index_add_(1, torch.tensor([1, 1], device=x.device), _square(x)),
    ],
    "index-select": [
        lambda x: _square(x).index_select(0, torch.tensor([1, 1], device=x.device)),
        lambda x: _square(x).index_select(1, torch.tensor([1, 1], device=x.device)),
    ],
    "pixel-shuffle": [lambda x: F.pixel_shuffle(_images(x), 2), lambda x: F.pixel_shuffle(_images(x), 4)],
}
"""Programs that torch_xla itself takes for the same, although they differ in an argument."""


def _with_gradient(
    function: Callable[[torch.Tensor], torch.Tensor], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    x = F.pad(VALUES, (1, 2)).to(device).requires_grad_()
    # A view: within an operator, torch_xla's views of views are wrong.
    y = function(x[1:-2])
    (y * torch.arange(1.0, y.numel() + 1, device=device).reshape(y.shape)).sum().backward()
    assert x.grad is not None
    return y.detach().cpu(), x.grad.cpu()


@pytest.mark.parametrize("name", REPLACED)
def test_operators_that_torch_xla_computes_wrongly_are_replaced(name: str) -> None:
    ours, theirs = (_with_gradient(REPLACED[name], device) for device in ("xla", "cpu"))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "where": lambda x, y: torch.where(torch.tensor([True, False], device=x.device), x, y),
    **{
        name: getattr(torch, name)
        for name in ("maximum", "minimum", "remainder", "fmod", "pow", "atan2", "xlogy")
    },
    **{f"bitwise-{name}": getattr(torch, f"bitwise_{name}") for name in ("and", "or", "xor")},
    **{f"shift-{name}": getattr(torch, f"bitwise_{name}_shift") for name in ("left", "right")},
    "clamp": lambda x, y: torch.clamp(x, y, y + 1),
    "clamp-below": lambda x, y: torch.clamp(x, max=y),
    "clamp-min": torch.clamp_min,
    "clamp-max": torch.clamp_max,
    "clamp-in-place": lambda x, y: (x * 1).clamp_(y),
    "remainder-in-place": lambda x, y: (x * 1).remainder_(y),
    "mse-loss": lambda x, y: F.mse_loss(*torch.broadcast_tensors(x, y.to(x.device))),
    "smooth-l1-loss": lambda x, y: F.smooth_l1_loss(*torch.broadcast_tensors(x, y.to(x.device))),
}
"""Operators with operands of two types."""
TYPES = (torch.float32, torch.bfloat16, torch.int64)


def _compute_at_once() -> None:
    """Compute what was begun in one program, where each result would have its own."""
    import torch_xla

    torch_xla.sync()


@pytest.mark.parametrize("name", MIXED)
def test_operands_of_two_types_have_a_result_of_torchs_type(name: str) -> None:
    expected, found = [], []
    shapes: tuple[tuple[int, ...], ...] = (2,), ()
    for of_x, of_y, shape_of_x, shape_of_y in itertools.product(TYPES, TYPES, shapes, shapes):
        x = torch.tensor([3.5, 6.0]).to(of_x)[: math.prod(shape_of_x)].reshape(shape_of_x)
        y = torch.tensor([2.0, 1.5]).to(of_y)[: math.prod(shape_of_y)].reshape(shape_of_y)
        try:
            expected.append(MIXED[name](x, y))
        except RuntimeError:
            # No type holds the result, or the operator takes other types.
            continue
        found.append(MIXED[name](x.to("xla"), y.to("xla")))
        if not y.dim():
            # Like a GPU, a TPU takes numbers from the host.
            expected.append(expected[-1])
            found.append(MIXED[name](x.to("xla"), y))
    assert {result.device.type for result in found} == {"xla"}
    _compute_at_once()
    assert len(found) >= 6
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=TOLERANCE, atol=TOLERANCE)


PROBABILITIES = torch.tensor([[0.1, 0.4, 0.5], [0.9, 0.3, 0.2]])
OPTIONAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "weight": lambda x: F.binary_cross_entropy(
        x, PROBABILITIES.to(x.device), weight=torch.tensor([1.0, 2.0, 3.0])
    ),
    "number": lambda x: F.binary_cross_entropy(x, PROBABILITIES.to(x.device), weight=torch.tensor(2.0)),
    "low": lambda x: torch.clamp(x, torch.tensor(0.3), torch.tensor(0.8, device=x.device)),
    "high": lambda x: torch.clamp(x, max=torch.tensor(0.3)),
    "type-of-mean": lambda x: (x > 0.2).mean(dtype=torch.float32) * x,
    "narrow-mean": lambda x: x.bfloat16().mean(1, dtype=torch.float32),
    "type-of-norm": lambda x: torch.linalg.vector_norm(x.bfloat16(), dim=1, dtype=torch.float32),
    "norm-of-complex": lambda x: torch.linalg.vector_norm(torch.complex(x, x + 1), 3, dim=1),
    "lerp": lambda x: torch.lerp(x, x * x, torch.tensor(0.25)),
    "loss-of-number": lambda x: F.mse_loss(x[0, 0], torch.tensor(1.0)),
    "smooth-loss-of-number": lambda x: F.smooth_l1_loss(x[0, 0], torch.tensor(3.0)),
}
"""Operators that left out an argument on the CPU, refused it, or took a type too late."""


@pytest.mark.parametrize("name", OPTIONAL)
def test_arguments_that_may_be_left_out_are_not(name: str) -> None:
    results = []
    for device in ("xla", "cpu"):
        x = PROBABILITIES.flip(0).to(device).requires_grad_()
        y = OPTIONAL[name](x)
        y.sum().backward()
        assert x.grad is not None
        results.append((y.detach().cpu(), x.grad.cpu()))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


EDGES = torch.tensor([0.1, 0.2, 0.3, 0.7, 1.0, 2.0])
AT_EDGES: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "eq-of-tensor": lambda x, edge: x == torch.tensor(edge, device=x.device),
    "eq-of-clamped": lambda x, edge: (x + 1).clamp(max=edge) == edge,
    "floor-divide": lambda x, edge: x // edge,
    "number-floor-divide": lambda x, edge: edge // x,
    "floor-of-quotient": lambda x, edge: torch.div(-x, edge, rounding_mode="floor"),
    "whole-part-of-quotient": lambda x, edge: torch.div(x, -edge, rounding_mode="trunc"),
    "threshold": lambda x, edge: F.threshold(x, edge, -1.0),
    "clamp-gradient": lambda x, edge: torch.autograd.grad(
        (y := x.clone().requires_grad_()).clamp(edge, 1.0).sum(), y
    )[0],
    "hardtanh-gradient": lambda x, edge: torch.autograd.grad(
        F.hardtanh(y := x.clone().requires_grad_(), -edge, edge).sum(), y
    )[0],
    "quotients-of-infinity": lambda x, edge: (
        torch.cat([x * 0 + float("inf"), x, -x, x * 0]) // (x.repeat(4) * 0 + edge)
    ),
    "divided-by-zero": lambda x, edge: torch.cat([x - edge, x]) // 0,
}
"""Operators of which the last digit of a number decides the result."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", AT_EDGES)
def test_a_number_has_as_many_digits_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    x = EDGES.to(dtype)
    # The numbers that the tensor holds, and those that were rounded to them.
    edges = [*x[:4].tolist(), 0.1, 0.2, 0.3, 0.7]
    found = [AT_EDGES[name](x.to("xla"), edge) for edge in edges]
    _compute_at_once()
    for ours, edge in zip(found, edges, strict=True):
        torch.testing.assert_close(ours.cpu(), AT_EDGES[name](x, edge), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("destination", ["xla", "cpu"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (2, 3)], ids=str)
def test_a_copy_between_host_and_device_keeps_the_shape(shape: tuple[int, ...], destination: str) -> None:
    source = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    x, part = torch.zeros(2, 3, device=destination), torch.zeros(4, 3, device=destination)
    x.copy_(source.to("cpu" if destination == "xla" else "xla"))
    part[1:3].copy_(source.to("cpu" if destination == "xla" else "xla"))
    torch.testing.assert_close((x + 0).cpu(), source.expand(2, 3))
    torch.testing.assert_close(part.cpu(), F.pad(source.expand(2, 3), (0, 0, 1, 1)))


def test_a_copy_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        torch.zeros(2, 3, device="xla").copy_(torch.zeros(2))


def test_complex_numbers_may_be_nan() -> None:
    x = torch.tensor([1 + 1j, complex(math.nan, 1), complex(1, math.nan)])
    torch.testing.assert_close(x.to("xla").isnan().cpu(), x.isnan())


def test_batch_norm_of_narrow_numbers_has_narrow_numbers() -> None:
    x = torch.linspace(-1, 1, 12).reshape(4, 3).bfloat16()
    ours, theirs = (
        F.batch_norm(x.to(device), torch.zeros(3, device=device), torch.ones(3, device=device)).abs()
        for device in ("xla", "cpu")
    )
    torch.testing.assert_close(ours.cpu(), theirs)


def test_running_statistics_on_the_host_are_refused() -> None:
    with pytest.raises(RuntimeError, match="running statistics are on cpu; move the whole module"):
        F.batch_norm(PROBABILITIES.to("xla"), torch.zeros(3), torch.ones(3), training=True)


SECOND_GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max-pool": lambda x: F.max_pool2d(x.reshape(1, 2, 3) ** 2, 2, 1),
    "max-pool-3d": lambda x: F.max_pool3d(_cube(x)[None] ** 2, 2, 1, padding=1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x.reshape(2, 3), x.reshape(2, 3) * 2),
    "einsum-of-one": lambda x: torch.einsum("ij,kj->ik", _square(x), _square(x)) * x[0],
    "einsum-of-three": lambda x: torch.einsum("i,i,j->ij", x, x + 1, x[:2]),
    "einsum-of-constants": lambda x: torch.einsum("i,ij->j", x, x.detach()[:, None] + 1) ** 3,
    "inverse": lambda x: torch.linalg.inv(_matrices(x)[..., :2]),
    "elu": lambda x: F.elu(x, 2.0) * x,
    "diagonal": lambda x: torch.diagonal(_cube(x), 1) ** 2,
    "index-add": lambda x: (x * x).index_add(0, torch.tensor([1, 1], device=x.device), x[:2]),
    "std": lambda x: torch.std(x) * x,
    "std-of-rows": lambda x: x.reshape(2, 3).std(1),
    "selu": lambda x: F.selu(x) * x,
    "kl-div": lambda x: F.kl_div(x.log_softmax(0), (x * x).softmax(0), reduction="none"),
    "cross": lambda x: torch.cross(x[:3], x[3:] ** 2, dim=0),
    "diag": lambda x: torch.diag(x * x, 1),
    "inverse-of-one": lambda x: torch.inverse(_matrices(x)[0, 0, :, :2]),
    "logdet": lambda x: torch.logdet(_matrices(x)[0, 1, :, :2] + 9 * torch.eye(2, device=x.device)),
    "slogdet": lambda x: torch.stack(torch.linalg.slogdet(_matrices(x)[0, :, :, 1:])),
    "svd": lambda x: torch.svd(_matrices(x)[0, 1, :, :2])[1],
}


@pytest.mark.parametrize("name", SECOND_GRADIENTS)
def test_gradients_have_gradients(name: str) -> None:
    found = []
    for device in ("xla", "cpu"):
        x = VALUES.clone().to(device).requires_grad_()
        y = SECOND_GRADIENTS[name](x)
        (gradient,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        (gradient * gradient).sum().backward()
        assert x.grad is not None
        found.append(x.grad.cpu())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SECOND_GRADIENTS)
def test_gradients_are_those_of_torch_func_too(name: str) -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        return SECOND_GRADIENTS[name](x).square().sum()

    found = [torch.func.grad(total)(VALUES.to(device)).cpu() for device in ("xla", "cpu")]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SECOND_GRADIENTS)
def test_derivatives_along_a_direction_are_those_of_torch(name: str) -> None:
    found = []
    for device in ("xla", "cpu"):
        x = VALUES.to(device)
        _, by_func = torch.func.jvp(SECOND_GRADIENTS[name], (x,), (direction(x),))
        with forward_ad.dual_level():
            result = SECOND_GRADIENTS[name](forward_ad.make_dual(x, direction(x)))
            by_dual = forward_ad.unpack_dual(result).tangent
        found.append((by_func.cpu(), by_dual.cpu()))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


NORMS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "of-features": (lambda: torch.nn.BatchNorm1d(5), (4, 5)),
    "of-images": (lambda: torch.nn.BatchNorm2d(3), (2, 3, 4, 4)),
    "without-parameters": (lambda: torch.nn.BatchNorm2d(3, affine=False), (2, 3, 4, 4)),
    "without-statistics": (lambda: torch.nn.BatchNorm1d(3, track_running_stats=False), (2, 3, 4)),
    "averages": (lambda: torch.nn.BatchNorm1d(3, momentum=None), (4, 3, 4)),
    "of-each": (lambda: torch.nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (2, 3, 4, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_trains_and_evaluates_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    make, shape = NORMS[name]
    found = []
    for device in ("xla", "cpu"):
        norm = make().to(device)
        numbers = []
        for is_training in (True, True, False):
            norm.train(is_training)
            x = torch.linspace(-3, 4, math.prod(shape)).square().reshape(shape)
            x = x.to(device, dtype).requires_grad_()
            y = norm(x)
            (y * direction(y)).sum().backward()
            assert x.grad is not None
            numbers += [y.detach(), x.grad]
        numbers += [
            *norm.buffers(),
            *(weight.grad for weight in norm.parameters() if weight.grad is not None),
        ]
        found.append([tensor.cpu() for tensor in numbers])
    tolerance = TOLERANCE if dtype == torch.float32 else 2**-5
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SAME_HASH)
def test_programs_that_differ_in_an_argument_are_not_taken_for_the_same(name: str) -> None:
    for function in SAME_HASH[name]:
        ours, theirs = (_with_gradient(function, device) for device in ("xla", "cpu"))
        for found, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("is_training", [True, None, False])
def test_native_dropout_drops_its_share(p: float, is_training: bool | None) -> None:
    x = torch.full((100, 100), 2.0, device="xla", requires_grad=True)
    y, kept = torch.native_dropout(x, p, is_training)
    y.sum().backward()
    assert (kept.dtype, kept.shape) == (torch.bool, x.shape)
    p = 0 if is_training is False else p
    assert kept.float().mean().item() == pytest.approx(1 - p, abs=0.03)
    expected = kept.cpu() / (1 - p) if p < 1 else torch.zeros(100, 100)
    torch.testing.assert_close(y.detach().cpu(), 2 * expected)
    assert x.grad is not None
    # torch's own gradient scales only if it was told that this is a training.
    scale = 1 if is_training else 1 - p
    torch.testing.assert_close(x.grad.cpu(), expected * scale)


def test_counts_of_numbers_have_their_type_and_shape() -> None:
    x = VALUES.reshape(2, 3).to("xla")
    for count in (torch.count_nonzero(x), torch.count_nonzero(x, 1), torch.count_nonzero(x, (0, 1))):
        assert count.dtype == torch.int64
    assert torch.count_nonzero(x, 1).tolist() == [3, 2]
    assert (torch.count_nonzero(x) / 2).item() == 2.5


def _normalised(replica: Replica | None) -> list[torch.Tensor]:
    x = torch.randn(8, 6, 20, 20, generator=torch.Generator().manual_seed(0)) + 1000
    # The C library computes the first: it has more numbers in a feature.
    parts = [x, x[:, :, :2, :2]]
    if replica:
        parts = [replica.to_device(part) for part in parts]
    norms = [
        norm
        for part in parts
        for norm in (
            F.batch_norm(part, part.new_zeros(6), part.new_ones(6), training=True),
            F.layer_norm(part, part.shape[-1:]),
            F.group_norm(part, 2),
        )
    ]
    return [norm.cpu() for norm in norms]


def test_norms_are_those_of_the_cpu_where_the_mean_is_large() -> None:
    for norms in polyxla.launch(_normalised, devices=2, runtime="pjrt"):
        for found, expected in zip(norms, _normalised(None), strict=True):
            # A number has only seven digits, of which the mean takes four.
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


def sums_of(dtype: torch.dtype, replica: Replica | None) -> list[torch.Tensor]:
    """Return sums of hundreds of numbers, computed by a replica in this dtype, or here without rounding."""

    def given(x: torch.Tensor) -> torch.Tensor:
        return replica.to_device(x.to(dtype)) if replica else x.to(dtype).double()

    numbers = torch.Generator().manual_seed(0)
    places = torch.arange(2048)
    if replica:
        places = replica.to_device(places)
    factors = given(torch.rand(2048, 1, generator=numbers) + 0.5)
    weight, row = given(torch.zeros(4, 8)).requires_grad_(), given(torch.zeros(1, 3)).requires_grad_()
    (F.embedding(places % 4, weight) * factors).sum().backward()
    (row.gather(1, (places % 3).reshape(1, -1)) * factors.reshape(1, -1)).sum().backward()
    image = given(torch.rand(1, 3, 64, 64, generator=numbers) + 0.5)
    assert weight.grad is not None
    assert row.grad is not None
    sums = (weight.grad, row.grad, image.sum(), F.avg_pool2d(image, 32), F.layer_norm(image, (64,)))
    return [found.cpu() for found in sums]


def assert_rounded_once(runtime: str, dtype: torch.dtype) -> None:
    """Assert that replicas compute `sums_of` a dtype as exactly as it can hold them."""
    for found in polyxla.launch(partial(sums_of, dtype), devices=2, runtime=runtime):
        for ours, exact in zip(found, sums_of(dtype, None), strict=True):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_narrow_numbers_are_rounded_once(dtype: torch.dtype) -> None:
    assert_rounded_once("pjrt", dtype)


def gradients_of_lstm(replica: Replica | None) -> list[torch.Tensor]:
    """Return gradients of a layer of many steps, computed by a replica or here."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer, sentence = torch.nn.LSTM(8, 8), torch.rand(24, 4, 8)
    if replica:
        layer, sentence = layer.to(replica.device), replica.to_device(sentence)
    layer(sentence)[0].pow(2).sum().backward()
    return [parameter.grad.cpu() for parameter in layer.parameters() if parameter.grad is not None]


def assert_lstm_is_right(runtime: str) -> None:
    """Assert that replicas compute `gradients_of_lstm` as the CPU does."""
    for found in polyxla.launch(gradients_of_lstm, devices=2, runtime=runtime):
        torch.testing.assert_close(found, gradients_of_lstm(None), rtol=1e-4, atol=1e-5)


def test_an_lstm_of_many_steps_has_the_gradients_of_the_cpu() -> None:
    assert_lstm_is_right("pjrt")


def interpolated(x: torch.Tensor, options: dict[str, Any]) -> list[torch.Tensor]:
    """Return the interpolation of a batch, and the gradient of a weighted sum of it."""
    x = x.detach().requires_grad_()
    found = F.interpolate(x, **options)
    (found * torch.arange(found.numel(), dtype=x.dtype).reshape(found.shape).to(x.device)).sum().backward()
    assert x.grad is not None
    return [found.detach().cpu(), x.grad.cpu()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize(
    "options",
    [{"scale_factor": 1.7}, {"scale_factor": (0.6, 2)}, {"scale_factor": 2}, {"size": (8, 3)}],
    ids=["up", "down", "whole", "size"],
)
def test_interpolate_is_as_on_the_cpu(options: dict[str, Any], mode: str, dtype: torch.dtype) -> None:
    x = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = interpolated(x, {**options, "mode": mode})
    found = interpolated(x.to("xla"), {**options, "mode": mode})
    # Of sizes, torch_xla interpolates bfloat16 in bfloat16.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.long
# Once in a process, torch says so of a result that is loaded.
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
# All of torch's operators, in two processes.
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("environ", [EMULATED, ON_BRIDGE], ids=["emulated", "cpu"])
def test_the_bridge_is_wrong_nowhere_alone(tmp_path: Path, environ: dict[str, str]) -> None:
    """Where torch_xla's own client and the bridge differ, the bridge computes what the CPU computes."""
    ours, theirs = tmp_path / "bridge", tmp_path / "own"
    for directory, variables in ((ours, environ), (theirs, OWN_CLIENT)):
        directory.mkdir()
        run(directory, variables)
    own = {name: numbers for name, numbers, _ in compared(theirs)}
    common = [outcome for outcome in compared(ours) if outcome[0] in own]
    # torch has 2950 samples that are not random; few operators end the process of either client.
    assert len(common) > 2500
    wrong = {
        name: difference(numbers, own[name], TOLERANCE)
        for name, numbers, expected in common
        if difference(numbers, expected, TOLERANCE)
    }
    assert {name: text for name, text in wrong.items() if text and name not in BOTH_WRONG} == {}
