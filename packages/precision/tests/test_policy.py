"""Properties of every policy; the differences are tested in test_full.py and test_bf16.py."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from polyxla_precision import BF16Mixed, BF16True, Full32
from polyxla_precision.policies import Policy, Precision16

MAKERS: list[Callable[[], Policy]] = [Full32, BF16Mixed, BF16True, Precision16]
KEEPERS = [BF16Mixed, BF16True]


@pytest.fixture(params=MAKERS)
def policy(request: pytest.FixtureRequest) -> Policy:
    made: Policy = request.param()
    return made


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_the_module_init_context_creates_modules_that_need_no_conversion(policy: Policy) -> None:
    with policy.module_init_context():
        made = _net()
    before = {name: (tensor.dtype, tensor.clone()) for name, tensor in made.state_dict().items()}
    assert policy.convert_module(made) is made
    for name, tensor in made.state_dict().items():
        assert tensor.dtype == before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_the_module_init_context_overrides_the_processes_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with Full32().module_init_context():
            assert nn.Linear(2, 2).weight.dtype == torch.float32
        assert nn.Linear(2, 2).weight.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_float64_modules_and_inputs_are_converted(policy: Policy) -> None:
    net = policy.convert_module(_net().double())
    weights = {parameter.dtype for parameter in net.parameters()}
    assert weights == {torch.bfloat16 if isinstance(policy, BF16True) else torch.float32}
    batch = {"x": torch.randn(4, 3, dtype=torch.float64), "y": torch.tensor([0, 1, 1, 0])}
    batch = policy.convert_input(batch)
    assert {batch["x"].dtype} == weights
    assert batch["y"].dtype == torch.int64


def test_a_loss_is_float32_and_gradients_have_their_parameters_dtype(policy: Policy) -> None:
    torch.manual_seed(1)
    net = policy.convert_module(_net())
    batch, target = policy.convert_input([torch.randn(8, 3), torch.tensor([0, 1] * 4)])
    with policy.forward_context():
        loss = policy.convert_output(nn.functional.cross_entropy(net(batch), target))
    loss.backward()
    assert loss.dtype == torch.float32
    gradients = [(parameter.grad, parameter.dtype) for parameter in net.parameters()]
    assert all(grad is not None and grad.any() and grad.dtype == dtype for grad, dtype in gradients)


def test_losses_and_metrics_are_returned_in_float32(policy: Policy) -> None:
    logged = {"loss": torch.ones(1, dtype=torch.bfloat16), "wrong": torch.tensor(3), "rate": 0.1}
    back = policy.convert_output(logged)
    assert (back["loss"].dtype, back["wrong"].dtype, back["rate"]) == (torch.float32, torch.int64, 0.1)


def test_two_threads_can_be_in_the_forward_context_at_once(policy: Policy) -> None:
    together = threading.Barrier(2, timeout=10)
    seen: list[bool] = []

    def enter() -> None:
        with policy.forward_context():
            together.wait()
        seen.append(torch.zeros(1).dtype == torch.float32 and not torch.is_autocast_enabled("cpu"))

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == [True, True]


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
@pytest.mark.parametrize("policy", [Full32(), Precision16(), BF16True(keep_float32=["head", "*norm*"])])
def test_policies_can_be_copied_and_pickled(policy: Policy, travel: Callable[[Policy], Policy]) -> None:
    other = travel(policy)
    assert type(other) is type(policy)
    assert repr(other) == repr(policy)


@pytest.mark.parametrize("make", KEEPERS)
def test_the_repr_shows_keep_float32(make: Callable[..., Policy]) -> None:
    policy = make(keep_float32=["head"])
    assert repr(policy) == f"{make.__name__}(keep_float32=('head',))"
    assert repr(make()) == f"{make.__name__}()"


@pytest.mark.parametrize("make", KEEPERS)
def test_keep_float32_refuses_a_single_string(make: Callable[..., Policy]) -> None:
    with pytest.raises(ValueError, match=r"write keep_float32=\('head',\)$"):
        make(keep_float32="head")


@pytest.mark.parametrize("make", KEEPERS)
def test_converting_twice_and_back_restores_the_module(make: Callable[..., Policy]) -> None:
    net = _net()
    plain = [set(vars(part)) for part in net.modules()]
    policy = make(keep_float32=("1",))
    policy.convert_module(policy.convert_module(net))
    assert len(net[1]._forward_pre_hooks) == 1
    Full32().convert_module(net)
    assert [set(vars(part)) for part in net.modules()] == plain
    assert not any(part._forward_pre_hooks for part in net.modules())


def test_a_name_that_matches_nothing_leaves_the_module_unchanged() -> None:
    net = _net()
    with pytest.raises(ValueError, match="keep_float32: 'head' matches no submodule"):
        BF16True(keep_float32=("head",)).convert_module(net)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("writer", "reader", "dtype"),
    [(BF16True, Full32, "float32"), (Full32, BF16True, "bfloat16")],
)
def test_weights_saved_under_another_policy_can_be_loaded(
    writer: type[Policy], reader: type[Policy], dtype: str
) -> None:
    written, net = writer().convert_module(_net()), _net()
    reader().convert_module(net).load_state_dict(written.state_dict())
    assert {parameter.dtype for parameter in net.parameters()} == {getattr(torch, dtype)}
    for parameter, other in zip(net.parameters(), written.parameters(), strict=True):
        assert torch.equal(parameter.to(torch.bfloat16), other.to(torch.bfloat16))
