"""Factors of an optimizer that become 1 are replaced for the time of its step, without another result."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch

from polyxla.xla.optimizer_factors import (
    FactorTensors,
    correction_is_one,
    factors_as_inputs,
)


def optimizer(**options: Any) -> torch.optim.AdamW:
    parameter = torch.nn.Parameter(torch.linspace(-2.0, 2.0, 50))
    return torch.optim.AdamW([parameter], **options)


@pytest.mark.parametrize("beta", [0.5, 0.9])
def test_the_step_at_which_the_correction_becomes_1_is_known(beta: float) -> None:
    made = optimizer(betas=(0.5, beta))
    [group] = made.param_groups
    [parameter] = group["params"]
    for step in range(1, 200):
        correction = torch.tensor((1 - beta**step) ** 0.5, dtype=torch.float32)
        assert correction_is_one(made, group) == (correction.item() == 1.0)
        parameter.grad = torch.ones(50)
        made.step()


def test_the_result_is_the_same_and_the_groups_are_restored() -> None:
    plain = optimizer(lr=1e-8, betas=(0.5, 0.5))
    guarded = copy.deepcopy(plain)
    uploaded: list[torch.Tensor] = []

    def upload(tensor: torch.Tensor) -> torch.Tensor:
        uploaded.append(tensor)
        return tensor

    tensors = FactorTensors(upload)
    for made in (plain, guarded):
        [parameter] = made.param_groups[0]["params"]
        for step in range(60):
            made.param_groups[0]["lr"] = 1e-3 if step < 50 else 1e-8
            parameter.grad = torch.sin(torch.arange(50.0) + step)
            with factors_as_inputs(made, tensors) if made is guarded else contextlib.nullcontext():
                made.step()
    assert [tensor.item() for tensor in uploaded] == [torch.tensor(1 - 1e-5).item(), 1.0]
    assert plain.state_dict()["param_groups"] == guarded.state_dict()["param_groups"]
    assert type(guarded.param_groups[0]["betas"][1]) is float
    torch.testing.assert_close(
        plain.param_groups[0]["params"][0], guarded.param_groups[0]["params"][0], rtol=5e-7, atol=1e-7
    )


def test_groups_are_restored_after_an_error() -> None:
    made = optimizer(lr=1e-8)
    with pytest.raises(ZeroDivisionError), factors_as_inputs(made, FactorTensors(lambda tensor: tensor)):
        raise ZeroDivisionError
    assert type(made.param_groups[0]["weight_decay"]) is float
