"""torch's own samples of its operators, forward and backward, on TorchTPU's emulated TPU and on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyxla
from polyxla import Replica

INTEGRATION = Path(__file__).parents[1]
sys.path += [str(INTEGRATION), str(INTEGRATION / "programs")]
from operators import difference  # noqa: E402
from test_operators import (  # noqa: E402
    EMULATED,
    OPERATORS,
    TOLERANCE,
    assert_lstm_is_right,
    assert_rounded_once,
    compared,
    operators_of,
    run,
)

MISSING = {
    *("kthvalue", "nn.functional.adaptive_max_pool2d", "nn.functional.mish", "std_mean"),
}
"""Operators, or their gradients, that TorchTPU 0.2.0 does not have."""
DIFFERENT = {
    *("abs[1]", "aminmax[4]", "lu_solve[4]", "nn.functional.hardsigmoid[3]", "norm.inf[4]", "sign[1]"),
    *("scatter_reduce.amax[4]", "scatter_reduce.amin[4]"),
}
"""Samples with NaN or infinity, and hardsigmoid at its edge, that TorchTPU's programs compute otherwise."""


def _pooled(replica: Replica | None) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(18.0).square().reshape(2, 9)
    x = (replica.to_device(x) if replica else x).requires_grad_()
    y = torch.cat([F.avg_pool1d(x, 3), F.avg_pool1d(x, 4, 2, 1, ceil_mode=True, count_include_pad=False)], 1)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach().cpu(), x.grad.cpu()


def test_average_pooling_has_a_gradient() -> None:
    (found,) = polyxla.launch(_pooled, devices=1, runtime="torchtpu")
    torch.testing.assert_close(found, _pooled(None))


def _lazily_made(replica: Replica | None) -> list[torch.Tensor]:
    device = replica.device if replica else torch.device("cpu")
    module = nn.Sequential(nn.LazyConv1d(3, 2), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(2))
    module.to(device)
    x = torch.arange(24.0, device=device).reshape(2, 3, 4)
    module(x)
    numbers = torch.Generator().manual_seed(0)
    state = {name: torch.rand(value.shape, generator=numbers) for name, value in module.state_dict().items()}
    module.load_state_dict(state)
    y = module(x)
    gradients = torch.autograd.grad(y.square().sum(), list(module.parameters()))
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert {parameter.device.type for parameter in module.parameters()} == {device.type}
    return [part.cpu() for part in (y.detach(), *gradients)]


def test_a_lazy_module_may_be_moved_before_its_first_call() -> None:
    (found,) = polyxla.launch(_lazily_made, devices=1, runtime="torchtpu")
    torch.testing.assert_close(found, _lazily_made(None), rtol=1e-3, atol=1e-3)


def _negated(replica: Replica | None) -> list[torch.Tensor]:
    x = torch.tensor([1 + 2j, 3 - 4j])
    x = (replica.to_device(x) if replica else x).requires_grad_()
    opposite = x.conj().imag
    (opposite * torch.arange(1.0, 3.0, device=x.device)).sum().backward()
    assert x.grad is not None
    opposite, into = opposite.detach(), torch.zeros(3, 2, device=x.device)
    into[0] = opposite
    into[1]._neg_view().copy_(torch.tensor([3, 5], dtype=torch.uint8, device=x.device))
    into[2]._neg_view().add_(opposite)
    onto = torch.zeros(2).copy_(opposite)
    return [*(part.cpu() for part in (opposite, opposite.clone(), opposite + 0, into, x.grad)), onto]


def test_a_negated_view_has_its_sign() -> None:
    (found,) = polyxla.launch(_negated, devices=1, runtime="torchtpu")
    torch.testing.assert_close(found, _negated(None))


def _celu(replica: Replica | None) -> list[torch.Tensor]:
    x = torch.tensor([-3.0, -0.1, 0.0, 0.5, 200.0])
    x = (replica.to_device(x) if replica else x).requires_grad_()
    y = F.celu(x, 2.0)
    y.square().sum().backward()
    assert x.grad is not None
    return [part.cpu() for part in (y.detach(), F.celu(x.detach() * 1, 0.5, inplace=True), x.grad)]


def test_celu_with_an_alpha_keeps_what_is_above_zero() -> None:
    (found,) = polyxla.launch(_celu, devices=1, runtime="torchtpu")
    torch.testing.assert_close(found, _celu(None))


def _normalised(replica: Replica | None) -> torch.Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)) + 1000
    return F.layer_norm(replica.to_device(x) if replica else x, (5,)).cpu()


def test_layer_norm_is_wrong_where_the_mean_is_large() -> None:
    (found,) = polyxla.launch(_normalised, devices=1, runtime="torchtpu")
    assert not torch.allclose(found, _normalised(None), rtol=0, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_narrow_numbers_are_rounded_once(dtype: torch.dtype) -> None:
    assert_rounded_once("torchtpu", dtype)


def test_an_lstm_of_many_steps_has_the_gradients_of_the_cpu() -> None:
    assert_lstm_is_right("torchtpu")


@pytest.mark.long
def test_common_operators_compute_what_the_cpu_computes(tmp_path: Path) -> None:
    assert run(tmp_path, EMULATED, *OPERATORS.split()) == 0
    found = {name: difference(ours, expected, TOLERANCE) for name, ours, expected in compared(tmp_path)}
    # torch 2.15 no longer has samples of qr.
    assert operators_of(found) == {*OPERATORS.split()} - {"qr"}
    assert len(found) > 300
    wrong = {name for name, text in found.items() if text}
    assert {name for name in wrong if name.partition("[")[0] not in MISSING} == DIFFERENT
