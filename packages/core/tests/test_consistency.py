"""Modules that differ between replicas, and optimizers that would train nothing, are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyxla import Replica, UsageError, launch
from polyxla.contracts.precision import UnchangedPrecision
from polyxla_testing import PluginInstaller


@pytest.fixture(autouse=True)
def _fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin.hide_others()
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "4")


def _everywhere(function: Callable[[Replica], Any], devices: int = 4) -> list[Any]:
    return launch(function, runtime="fake", devices=devices)


class _Net(torch.nn.Module):
    flags: torch.Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(self.layer.weight, value)
        torch.nn.init.zeros_(self.layer.bias)
        self.register_buffer("flags", torch.tensor([value > 0, True]))
        self.register_buffer("empty", torch.ones(0))


def test_replicas_that_differ_take_the_parameters_of_ordinal_0(capsys: pytest.CaptureFixture[str]) -> None:
    def weights(replica: Replica) -> Any:
        module = replica.setup(_Net(float(replica.ordinal)))
        return [tensor.tolist() for tensor in module.state_dict().values()]

    assert _everywhere(weights) == [[tensor.tolist() for tensor in _Net(0.0).state_dict().values()]] * 4
    said = capsys.readouterr().err
    assert said.count("replicas began with different parameters (layer.weight): all take ordinal 0's") == 1


def test_replicas_that_differ_on_purpose_keep_their_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    def weights(replica: Replica) -> Any:
        module = replica.setup(_Net(float(replica.ordinal)), same=False)
        return [tensor.tolist() for tensor in module.state_dict().values()]

    expected = [[tensor.tolist() for tensor in _Net(float(n)).state_dict().values()] for n in range(4)]
    assert _everywhere(weights) == expected
    assert "different" not in capsys.readouterr().err


def test_replicas_that_agree_cause_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    _everywhere(lambda replica: replica.setup(_Net(1.0)) and None)
    assert "different" not in capsys.readouterr().err


def test_replicas_with_different_modules_are_refused() -> None:
    def make(replica: Replica) -> None:
        replica.setup(torch.nn.Linear(2, 2, bias=replica.ordinal > 0))

    with pytest.raises(UsageError, match="replicas made different modules"):
        _everywhere(make)


def test_a_step_without_setup_warns_if_replicas_differ(capsys: pytest.CaptureFixture[str]) -> None:
    def train(replica: Replica) -> None:
        module = _Net(float(replica.ordinal))
        module.layer(torch.ones(1, 2)).sum().backward()
        replica.step(torch.optim.SGD(module.layer.parameters(), lr=0.1))

    _everywhere(train)
    assert "replicas begin with different parameters" in capsys.readouterr().err


def test_an_optimizer_made_before_holds_the_moved_parameters() -> None:
    def train(replica: Replica) -> Any:
        # Where a move makes new parameters, as it does on a TPU.
        replica.device = torch.device("meta")
        module = _Net(1.0)
        old = module.layer.weight
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        replica.setup(module, optimizer)
        assert module.layer.weight is not old
        held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        return held == [id(parameter) for parameter in module.parameters()]

    assert _everywhere(train, 1) == [True]


def test_an_optimizer_of_another_module_is_refused() -> None:
    def setup(replica: Replica) -> None:
        optimizer = torch.optim.SGD([*_Net(1.0).parameters()], lr=0.1)
        replica.setup(_Net(1.0), optimizer)

    with pytest.raises(UsageError) as caught:
        _everywhere(setup, 1)
    assert str(caught.value) == (
        "only 0 of the 2 parameters of SGD belong to _Net; it would never train the others "
        "(from an optimizer made before the module was moved or changed). "
        "Make the optimizer from the parameters of the module that is trained."
    )


def _steps_with_a_layer(replica: Replica) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    # Written as for Lightning's Fabric, and two layers can be unpacked.
    _, optimizer = replica.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    replica.step(optimizer)  # type: ignore[arg-type]


def _sets_up_a_loader(replica: Replica) -> None:
    replica.setup(_Net(1.0), [torch.ones(1)])  # type: ignore[arg-type]


@pytest.mark.parametrize(("train", "kind"), [(_steps_with_a_layer, "Linear"), (_sets_up_a_loader, "list")])
def test_what_is_not_an_optimizer_is_refused(train: Callable[..., None], kind: str) -> None:
    with pytest.raises(UsageError) as caught:
        _everywhere(train, 1)
    assert str(caught.value) == (
        f"{kind} is not an optimizer (from replica.setup or replica.step). "
        "Write model = replica.setup(model, optimizer), which returns the module alone and changes the "
        "optimizer in place. Loaders go to replica.loader."
    )


class _Doubling(UnchangedPrecision):
    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module.double()


def test_a_module_whose_optimizer_is_refused_is_not_converted() -> None:
    module, other = _Net(1.0), torch.optim.SGD([*_Net(1.0).parameters()], lr=0.1)
    policy = _Doubling()
    launch(lambda replica: replica.setup(module), runtime="fake", devices=1, precision=policy)
    assert module.layer.weight.dtype == torch.float64
    module.float()
    with pytest.raises(UsageError, match="0 of the 2 parameters of SGD"):
        launch(lambda replica: replica.setup(module, other), runtime="fake", devices=1, precision=policy)
    assert module.layer.weight.dtype == torch.float32


def test_an_optimizer_whose_parameters_are_elsewhere_is_refused_at_its_first_step() -> None:
    def train(replica: Replica) -> None:
        elsewhere = torch.nn.Parameter(torch.ones(2, device="meta"))
        here = torch.nn.Parameter(torch.ones(2))
        here.sum().backward()
        replica.step(torch.optim.SGD([here, elsewhere], lr=0.1))

    with pytest.raises(UsageError, match="1 of the 2 parameters of SGD are on cpu"):
        _everywhere(train, 1)


def test_an_optimizer_without_gradients_is_refused_at_its_first_step() -> None:
    def train(replica: Replica) -> None:
        weight, unused = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(()))
        weight.square().backward()
        replica.step(torch.optim.SGD([unused], lr=0.1))

    with pytest.raises(UsageError, match="none of the 1 parameters of SGD has a gradient"):
        _everywhere(train, 1)
