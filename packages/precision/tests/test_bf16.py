"""The two bfloat16 policies: which tensors are bfloat16, and which stay float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyxla_precision import BF16Mixed, BF16True
from polyxla_precision.policies import Precision16

BF16, F32 = torch.bfloat16, torch.float32


class Recurrent(nn.Module):
    """Creates its state without a dtype, as modules do that were written for one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = self.cell(x, torch.zeros(x.shape[0], 4))
        normal = self.norm(state)
        return state, normal, self.head(normal)


def _dtypes(policy: BF16Mixed | BF16True, net: nn.Module) -> list[torch.dtype]:
    x = policy.convert_input(torch.randn(5, 3))
    with policy.forward_context():
        return [tensor.dtype for tensor in policy.convert_module(net)(x)]


def test_mixed_keeps_weights_and_inputs_in_float32() -> None:
    policy, net = BF16Mixed(), nn.Linear(3, 2)
    policy.convert_module(net)
    assert policy.convert_input(torch.ones(1, dtype=torch.float64)).dtype == F32
    with policy.forward_context():
        out = net(torch.ones(2, 3))
        loss = nn.functional.mse_loss(out, torch.ones(2, 2))
    assert (out.dtype, loss.dtype, net.weight.dtype) == (BF16, F32, F32)


def test_mixed_creates_float32_tensors_in_the_forward_context() -> None:
    with BF16Mixed().forward_context():
        assert torch.zeros(1).dtype == F32


def test_true_creates_bfloat16_tensors_in_the_forward_context() -> None:
    assert _dtypes(BF16True(), Recurrent()) == [BF16, BF16, BF16]


def test_true_computes_in_bfloat16_for_inputs_of_any_dtype() -> None:
    linear = nn.Linear(3, 2)
    BF16True().convert_module(linear)
    assert linear(torch.randn(5, 3)).dtype == BF16


def test_true_casts_a_float32_modules_output_to_bfloat16_for_the_next_module() -> None:
    net = Recurrent()
    assert _dtypes(BF16True(keep_float32=("norm",)), net) == [BF16, F32, BF16]
    assert (net.norm.weight.dtype, net.head.weight.dtype) == (F32, BF16)


def test_mixed_computes_a_module_in_keep_float32_in_float32() -> None:
    x = torch.randn(5, 3)
    plain, keeping = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), BF16Mixed(keep_float32=("1",))
    keeping.convert_module(plain)
    with keeping.forward_context():
        out = plain(x)
    with BF16Mixed().forward_context():
        hidden = nn.functional.linear(x, plain[0].weight, plain[0].bias)  # type: ignore[arg-type]
    assert out.dtype == F32
    assert torch.equal(out, nn.functional.linear(hidden.float(), plain[1].weight, plain[1].bias))  # type: ignore[arg-type]


def test_a_module_in_keep_float32_creates_float32_tensors() -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.full((1,), 1 / 3)

    net = nn.Sequential(Adds())
    policy = BF16True(keep_float32=("0",))
    policy.convert_module(net)
    with policy.forward_context():
        out = net(torch.zeros(1))
    assert torch.equal(out, torch.full((1,), 1 / 3))


def test_precision_16_is_bf16_mixed_and_says_so() -> None:
    policy = Precision16()
    assert isinstance(policy, BF16Mixed)
    assert policy.describe().startswith("precision 16 means bfloat16 here: ")
    assert BF16Mixed().describe() == ""


def test_true_loses_small_updates_as_its_description_says() -> None:
    assert "an update smaller than 1/512 of a weight is lost" in BF16True().describe()
    weights = torch.rand(10_000).add(0.1).to(BF16)
    assert torch.equal((weights.double() * (1 + 1 / 600)).to(BF16), weights)
    assert not torch.equal((weights.double() * (1 + 1 / 200)).to(BF16), weights)


@pytest.mark.parametrize(("beta2", "shrinks"), [(0.999, False), (0.95, True)])
def test_true_keeps_adamws_second_moment_from_shrinking(beta2: float, shrinks: bool) -> None:
    module = nn.Linear(100, 1, bias=False)
    nn.init.ones_(module.weight)
    BF16True().convert_module(module)
    weight = module.weight
    optimizer = torch.optim.AdamW([weight], betas=(0.9, beta2))
    weight.grad = torch.linspace(0.1, 2, 100).to(BF16)[None]
    optimizer.step()
    before = optimizer.state[weight]["exp_avg_sq"].clone()
    assert before.dtype == BF16
    weight.grad = torch.zeros_like(weight)
    for _ in range(10):
        optimizer.step()
    after = optimizer.state[weight]["exp_avg_sq"]
    assert bool((after < before).all()) == shrinks
    assert torch.equal(after, before) != shrinks
