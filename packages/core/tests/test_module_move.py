"""Moving a module keeps its tied parameters tied. The meta device makes new tensors, as XLA does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._lazy.ts_backend

from polyxla import UsageError
from polyxla.replica.module_move import check_initialized, move_module

META, CPU = torch.device("meta"), torch.device("cpu")


class _Tied(torch.nn.Module):
    scale: torch.Tensor
    none: Any

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.hidden = torch.nn.Linear(3, 3)
        self.out = torch.nn.Linear(3, 4, bias=False)
        self.out.weight = self.embed.weight
        self.again = torch.nn.ModuleDict({"deep": torch.nn.Linear(3, 4, bias=False)})
        self.again["deep"].weight = self.embed.weight
        scale = torch.ones(2)
        self.register_buffer("scale", scale)
        self.hidden.register_buffer("scale", scale)
        self.register_buffer("none", None)


def test_a_plain_move_to_the_meta_device_unties_parameters() -> None:
    module = _Tied().to(META)
    assert module.out.weight is not module.embed.weight, "or these tests would prove nothing"


def test_tied_parameters_and_buffers_stay_tied(capsys: pytest.CaptureFixture[str]) -> None:
    module = _Tied()
    assert move_module(module, META) is module
    assert module.embed.weight.device == META
    assert module.out.weight is module.embed.weight
    assert module.again["deep"].weight is module.embed.weight
    assert module.hidden.scale is module.scale
    assert module.scale.device == META
    assert module.hidden.weight is not module.embed.weight
    assert module.none is None
    assert len(list(module.parameters())) == 3
    assert capsys.readouterr().err == ""


@pytest.fixture(scope="module")
def lazy() -> torch.device:
    """A device where a move makes new tensors, which have values: torch's own, on the CPU."""
    torch._lazy.ts_backend.init()
    return torch.device("lazy")


def test_tied_parameters_train_as_one_after_the_move(lazy: torch.device) -> None:
    module = _Tied()
    move_module(module, lazy)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.out(torch.ones(3, device=lazy)).sum().backward()
    before = module.embed.weight.detach().cpu().clone()
    optimizer.step()
    assert torch.equal(module.embed.weight.cpu(), before - 1)
    assert torch.equal(module.out.weight.cpu(), module.embed.weight.cpu())


def test_an_optimizer_holds_the_moved_parameters() -> None:
    module = _Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    move_module(module, META, [optimizer])
    (group,) = optimizer.param_groups
    assert [*map(id, group["params"])] == [*map(id, module.parameters())]
    assert {parameter.device for parameter in group["params"]} == {META}


class _Hooked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(2, 2)
        self.two = torch.nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.moved: list[torch.device] = []

    def on_post_move_to_device(self) -> None:
        self.moved.append(self.one.weight.device)
        assert self.two.weight is self.one.weight, "the module is whole when its hook is called"


def test_on_post_move_to_device_is_called_after_each_move() -> None:
    module = _Hooked()
    move_module(module, CPU)
    move_module(module, META)
    assert module.moved == [CPU, META]


class _Untying(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(2, 2, bias=False)
        self.two = torch.nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight

    def on_post_move_to_device(self) -> None:
        self.two.weight = torch.nn.Parameter(self.one.weight.detach().clone())


def test_a_changed_number_of_parameters_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    move_module(_Untying(), CPU)
    assert capsys.readouterr().err == (
        "polyxla: the module has 2 parameters after the move to cpu, 1 before it: "
        "tie them again in on_post_move_to_device, or the copies will diverge\n"
    )


def test_a_layer_that_has_seen_no_input_is_refused() -> None:
    module = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.LazyBatchNorm1d())
    with pytest.raises(UsageError) as caught:
        check_initialized(module)
    assert str(caught.value) == (
        "0.weight, 0.bias, 1.weight have no shape before the first batch (from Sequential, which has lazy "
        "layers). Pass an example through the module on the CPU before it is trained: module(example)."
    )
    module(torch.ones(2, 3))
    check_initialized(module)
