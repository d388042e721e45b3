"""How a mesh is described, and what of a module is divided; integration/torchtpu divides modules."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from polyxla import UsageError
from polyxla_training import Trainer
from polyxla_training.sharding.mesh_shape import complete
from polyxla_training.sharding.sharded_module import (
    check_can_initialise,
    find_blocks,
    find_styles,
    initialise,
)


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("fsdp", {"fsdp": -1}),
        ({"tp-plan": 2, "fsdp": 4}, {"tp-plan": 2, "fsdp": 4}),
        ("ddp", None),
        ("auto", None),
        ("debug", None),
    ],
)
def test_a_strategy_is_a_mesh_or_none(strategy: Any, mesh: dict[str, int] | None) -> None:
    assert Trainer(strategy=strategy).mesh == mesh


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        ({"pipeline": 2}, "'pipeline' is not a dimension of a mesh: ddp, fsdp, zero1, tp-plan are"),
        ({"fsdp": 0}, "the size 0 of fsdp is neither a positive integer nor -1"),
        ({"fsdp": True}, "the size True of fsdp is neither"),
        ({"fsdp": 2, "zero1": 2}, "fsdp and zero1 both divide the optimizer's state"),
    ],
)
def test_what_is_no_mesh_is_refused(strategy: dict[str, int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Trainer(strategy=strategy)


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ({"fsdp": -1}, {"fsdp": 8}),
        ({"tp-plan": 2, "fsdp": -1}, {"fsdp": 4, "tp-plan": 2}),
        ({"fsdp": 4, "ddp": 2}, {"ddp": 2, "fsdp": 4}),
    ],
)
def test_a_mesh_is_completed_in_the_order_of_its_dimensions(
    shape: dict[str, int], found: dict[str, int]
) -> None:
    assert list(complete(shape, 8, "here").items()) == list(found.items())


@pytest.mark.parametrize(
    "shape", [{}, {"fsdp": 3}, {"fsdp": 16}, {"ddp": -1, "fsdp": -1}, {"ddp": 3, "fsdp": -1}]
)
def test_a_mesh_has_all_replicas(shape: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="is not one of 8 replicas"):
        complete(shape, 8, "here")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Model(nn.Module):
    tp_plan: ClassVar[dict[str, Any]] = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.heads = nn.Sequential(nn.ReLU(), nn.Linear(4, 10, bias=False))


def test_blocks_are_the_elements_of_the_outermost_lists() -> None:
    model = Model()
    assert find_blocks(model) == [*model.layers, model.heads[1]]


def test_a_block_that_shares_a_parameter_belongs_to_the_rest() -> None:
    model = Model()
    model.heads[1].weight = model.embed.weight
    assert find_blocks(model) == [*model.layers]


def test_the_plan_names_parts_by_patterns() -> None:
    model = Model()
    styles = find_styles(model)
    assert {part: type(style) for part, style in styles.items()} == {
        part: kind
        for layer in model.layers
        for part, kind in ((layer.up, ColwiseParallel), (layer.down, RowwiseParallel))
    }


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (None, "Model has no tp_plan: None"),
        ({"layers.up": "colwise"}, "no part of Model is called 'layers.up'"),
        (
            {"layers.*.up": "sideways"},
            "'sideways' is not a style of a part: colwise, rowwise, sequence_parallel",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    plan: dict[str, str] | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "tp_plan", plan)
    with pytest.raises(UsageError, match=text):
        find_styles(Model())


def test_meta_tensors_get_the_same_values_for_the_same_seed() -> None:
    state, found = torch.get_rng_state(), []
    for seed in (1, 1, 2):
        with torch.device("meta"):
            model = Model()
        model.heads[1].weight = model.embed.weight
        check_can_initialise(model)
        initialise(list(model.modules()), seed)
        assert model.heads[1].weight is model.embed.weight
        layer: Any = model.layers[0]
        found.append(layer.up.weight.detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_part_that_cannot_be_initialised_is_named() -> None:
    model = Model()
    model.scale = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(UsageError, match=r"no reset_parameters: the module itself \(Model\)"):
        check_can_initialise(model)
