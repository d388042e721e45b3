"""A factor of an optimizer that is 1 in float32, and so a constant of its program, is named."""

from __future__ import annotations

import pytest
import torch

from polyxla_training.observe.compilations import constant_factors


@pytest.mark.parametrize(("rate", "is_one"), [(1e-3, False), (3.1e-6, False), (2.9e-6, True), (0.0, False)])
def test_a_decay_without_effect_in_float32_is_named(rate: float, is_one: bool) -> None:
    made = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=rate, weight_decay=0.01)
    said = [sentence for sentence in constant_factors(made) if "1 - lr * weight_decay" in sentence]
    assert bool(said) == is_one
    assert rate == 0.0 or (torch.tensor(1 - rate * 0.01, dtype=torch.float32).item() == 1.0) == is_one
