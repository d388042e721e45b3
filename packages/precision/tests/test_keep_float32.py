"""Modules in several dtypes: what is converted, what is attached, and that it can be removed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from polyxla_precision import keep_float32

BF16, F32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    """Two blocks with a norm each, a list that is never called itself, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"linear": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)}) for _ in range(2)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = block["norm"](block["linear"](x))
        result: torch.Tensor = self.head(x)
        return result


@pytest.fixture
def net() -> Net:
    return Net()


def _keep(net: nn.Module, *names: str, others: torch.dtype = BF16) -> None:
    found = keep_float32.find_modules(net, names)
    keep_float32.convert_tensors(net, others, found)
    keep_float32.attach_casts(net, found, cast_others=True)


def _seen(module: nn.Module, net: nn.Module, x: torch.Tensor) -> tuple[Any, Any]:
    """Return the dtypes of a module's first input and of its output, as forward and its callers see them."""
    seen: list[torch.dtype] = []
    handles = [
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype)),
        module.register_forward_hook(lambda _, __, output: seen.append(output.dtype)),
    ]
    net(x)
    for handle in handles:
        handle.remove()
    return seen[0], seen[1]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["head"], ["head"]),
        (["blocks.1.norm"], ["blocks.1.norm"]),
        (["*norm"], ["blocks.0.norm", "blocks.1.norm"]),
        (["*norm", "blocks.0.norm"], ["blocks.0.norm", "blocks.1.norm"]),
        (["blocks.0"], ["blocks.0", "blocks.0.linear", "blocks.0.norm"]),
        ([], []),
    ],
)
def test_names_and_patterns_find_modules_and_the_modules_inside_them(
    net: Net, names: list[str], found: list[str]
) -> None:
    assert keep_float32.find_modules(net, names) == [net.get_submodule(name) for name in found]


def test_a_module_is_found_under_each_of_its_names(net: Net) -> None:
    net.classifier = net.head
    assert keep_float32.find_modules(net, ["classifier"]) == [net.head]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("norm", "did you mean blocks.0.norm, blocks.1.norm?"),
        ("heda", "did you mean head?"),
        ("", "submodules are: blocks, "),
        ("*attention*", "submodules are: blocks, "),
    ],
)
def test_a_name_that_matches_nothing_is_an_error_with_similar_names(net: Net, name: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        keep_float32.find_modules(net, ["head", name])
    assert str(caught.value).startswith(f"keep_float32: {name!r} matches no submodule; {said}")


def test_each_module_gets_its_dtype_and_integer_buffers_stay_integers(net: Net) -> None:
    _keep(net, "*norm")
    dtypes = {name: tensor.dtype for name, tensor in net.state_dict().items()}
    counts = {name for name in dtypes if name.endswith("num_batches_tracked")}
    norms = {name for name in dtypes if ".norm." in name} - counts
    assert {dtypes.pop(name) for name in counts} == {torch.int64}
    assert {dtypes.pop(name) for name in norms} == {F32}
    assert set(dtypes.values()) == {BF16}


def test_weights_kept_in_float32_are_not_rounded(net: Net) -> None:
    before = net.head.weight.detach().clone()
    _keep(net, "head")
    assert torch.equal(net.head.weight, before)


def test_gradients_are_converted_with_their_parameters(net: Net) -> None:
    net(torch.randn(3, 4)).sum().backward()
    before = net.head.weight.grad
    assert before is not None
    before = before.clone()
    _keep(net, "head")
    assert net.head.weight.grad is not None
    assert torch.equal(net.head.weight.grad, before)
    assert {
        parameter.grad.dtype == parameter.dtype
        for parameter in net.parameters()
        if parameter.grad is not None
    } == {True}


def test_shared_tensors_stay_shared() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    net[1].weight = net[0].weight
    net[3].running_mean = net[2].running_mean
    for dtype in (BF16, F32):
        keep_float32.convert_tensors(net, dtype, [])
        assert net[1].weight is net[0].weight
        assert net[3].running_mean is net[2].running_mean
        assert (net[1].weight.dtype, net[3].running_mean.dtype) == (dtype, dtype)


def test_recurrent_weights_are_converted_in_the_flat_list_too() -> None:
    lstm = nn.LSTM(2, 3)
    keep_float32.convert_tensors(lstm, BF16, [])
    out, _ = lstm(torch.ones(4, 1, 2, dtype=BF16))
    assert out.dtype == BF16


def test_a_float32_module_may_not_share_its_weight_with_a_converted_one(net: Net) -> None:
    net.head = nn.Linear(4, 4)
    net.out = nn.Linear(4, 4)
    net.out.weight = net.head.weight
    with pytest.raises(ValueError, match="shares a parameter with 'head', which is not in keep_float32"):
        keep_float32.convert_tensors(net, BF16, keep_float32.find_modules(net, ["out"]))
    # In float32 both have the same dtype, and autocast casts what it needs.
    keep_float32.convert_tensors(net, F32, keep_float32.find_modules(net, ["out"]))


def test_inputs_are_cast_to_each_modules_dtype(net: Net) -> None:
    _keep(net, "*norm")
    x = torch.randn(3, 4, dtype=BF16)
    assert _seen(net.get_submodule("blocks.0.norm"), net, x) == (F32, F32)
    assert _seen(net.get_submodule("blocks.1.linear"), net, x) == (BF16, BF16)


def test_keeping_a_module_list_keeps_the_modules_inside_it(net: Net) -> None:
    _keep(net, "blocks")
    x = torch.randn(3, 4, dtype=BF16)
    assert _seen(net.get_submodule("blocks.1.linear"), net, x) == (F32, F32)
    assert _seen(net.head, net, x) == (BF16, BF16)


def test_keyword_and_nested_arguments_are_cast_too() -> None:
    class Takes(nn.Module):
        def forward(self, pair: Any, *, mask: torch.Tensor, index: torch.Tensor) -> Any:
            return pair[0].dtype, mask.dtype, index.dtype

    net = nn.ModuleDict({"takes": Takes()})
    _keep(net, "takes")
    one = torch.ones(1, dtype=BF16)
    assert net["takes"]((one, 3), mask=one, index=one.long()) == (F32, F32, torch.int64)


def test_inputs_of_a_module_with_integer_weights_are_cast_to_the_dtype_of_its_scale() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[2, 3]], dtype=torch.int8), requires_grad=False)
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale

    net = Quantised()
    _keep(net)
    assert net(torch.tensor([[0.5, 0.75]])).tolist() == [[1.625]]
    assert net(torch.ones(1, 2)).dtype == BF16
    # Without a floating-point parameter there is nothing to cast to.
    net.scale = nn.Parameter(torch.tensor(2, dtype=torch.int8), requires_grad=False)
    assert net(torch.tensor([[0.5, 0.75]])).tolist() == [[6.5]]
    _keep(net)
    assert not net._forward_pre_hooks


def test_autocast_is_off_inside_a_float32_module(net: Net) -> None:
    found = keep_float32.find_modules(net, ["head"])
    keep_float32.attach_casts(net, found, cast_others=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert net.blocks[0]["linear"](torch.randn(3, 4)).dtype == BF16  # type: ignore[index]
        assert net(torch.randn(3, 4)).dtype == F32
        with pytest.raises(RuntimeError):
            net.head(torch.randn(3, 9))
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    "travel",
    [
        lambda net: net,
        copy.deepcopy,
        lambda net: pickle.loads(pickle.dumps(net)),
        lambda net: net.to("cpu"),
    ],
    ids=["none", "deepcopy", "pickle", "to"],
)
def test_the_casts_move_copy_and_pickle_with_the_module(net: Net, travel: Callable[[Net], Net]) -> None:
    _keep(net, "head")
    other = travel(net)
    x = torch.randn(3, 4, dtype=BF16)
    assert _seen(other.head, other, x) == (F32, F32)
    # The copy's own head computes, not the head of the module that it was copied from.
    with torch.no_grad():
        net.head.weight.fill_(2)
        other.head.weight.zero_()
        other.head.bias.fill_(7)
    assert torch.equal(other(x), torch.full((3, 2), 7.0))


@pytest.mark.parametrize(
    "travel", [lambda net: net, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))]
)
def test_remove_casts_restores_the_module(net: Net, travel: Callable[[Net], Net]) -> None:
    plain = {name: set(vars(part)) for name, part in net.named_modules()}
    _keep(net, "*norm")
    other = travel(net)
    keep_float32.remove_casts(other)
    assert {name: set(vars(part)) for name, part in other.named_modules()} == plain
    assert not any(part._forward_pre_hooks for part in other.modules())
    assert not any(part._forward_pre_hooks_with_kwargs for part in other.modules())


def test_attaching_again_replaces_the_first_casts(net: Net) -> None:
    for _ in range(2):
        _keep(net, "head")
    assert [len(part._forward_pre_hooks) for part in (net.head, net.get_submodule("blocks.0.linear"))] == [
        1,
        1,
    ]
    assert not isinstance(net.head.forward.forward, keep_float32.Float32Forward)  # type: ignore[attr-defined]


def test_a_forward_that_the_user_replaced_is_restored(net: Net) -> None:
    replaced = torch.relu
    net.head.forward = replaced  # type: ignore[method-assign]
    _keep(net, "head")
    assert net(torch.randn(3, 4)).shape == (3, 4)
    keep_float32.remove_casts(net)
    assert net.head.forward is replaced


def test_only_modules_with_parameters_get_a_hook(net: Net) -> None:
    _keep(net, "head")
    hooked = {name for name, part in net.named_modules() if part._forward_pre_hooks}
    assert hooked == {"head", *(f"blocks.{i}.{part}" for i in (0, 1) for part in ("linear", "norm"))}
    keep_float32.attach_casts(net, [], cast_others=False)
    assert not any(part._forward_pre_hooks for part in net.modules())


def test_a_module_converted_by_hand_gets_inputs_in_its_new_dtype(net: Net) -> None:
    _keep(net)
    assert net(torch.randn(3, 4)).dtype == BF16
    assert net.double()(torch.randn(3, 4)).dtype == torch.float64
