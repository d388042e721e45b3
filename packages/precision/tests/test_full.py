"""Full precision: float32 and nothing else."""

from __future__ import annotations

import torch

from polyxla_precision import Full32


def test_the_forward_context_changes_nothing_and_can_be_entered_again() -> None:
    policy = Full32()
    for _ in range(2):
        with policy.forward_context() as context:
            assert context is None
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_a_bfloat16_module_becomes_float32_in_place() -> None:
    module = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    weight = module.weight
    assert Full32().convert_module(module) is module
    assert module.weight is weight
    assert weight.dtype == torch.float32
    assert repr(Full32()) == "Full32()"
