"""Known defects of Lightning and Accelerate on torch_xla 2.9, which polyxla must not have: one test for each.

The docstring of a test is the defect, found by running Lightning 2.6.6 and Accelerate 1.15.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla import Replica, UsageError
from polyxla_testing import RuntimeUnderTest
from polyxla_training import Trainer


def _on(replica: Replica, *shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=replica.device)


def _train_with_own_optimizer(replica: Replica) -> tuple[bool, bool]:
    module = nn.Linear(4, 2)
    before = module.weight.detach().clone()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    replica.setup(module, optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        module(_on(replica, 3, 4)).square().mean().backward()
        replica.step(optimizer)
    return torch.equal(module.weight.cpu(), before), len(optimizer.state) == 2


def test_an_optimizer_created_before_the_move_trains(runtime: RuntimeUnderTest) -> None:
    """An optimizer created before the move keeps the host's parameters, and five steps change nothing."""
    assert runtime.launch(_train_with_own_optimizer, devices=1) == [(False, True)]


def _train_with_a_forgotten_optimizer(replica: Replica, uses_setup: bool) -> None:
    module = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    placed = replica.setup(module) if uses_setup else module.to(replica.device)
    placed(_on(replica, 3, 4)).square().mean().backward()
    replica.step(optimizer)


@pytest.mark.parametrize("uses_setup", [True, False], ids=["setup", "to"])
def test_an_optimizer_of_another_devices_parameters_is_refused(
    runtime: RuntimeUnderTest, uses_setup: bool
) -> None:
    """The same with ``module.to``: refused at the first step, because nothing would be trained."""
    with pytest.raises(UsageError, match=r"0 of the 2 parameters of AdamW are on (xla|tpu)") as caught:
        runtime.launch(_train_with_a_forgotten_optimizer, uses_setup, devices=1)
    assert caught.value.fix == (
        "Make the optimizer after the module is on the device, or pass both to replica.setup."
    )


class MadeInList(nn.Module):
    """A module that makes its optimizer in the constructor, and keeps it in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.kept = [torch.optim.SGD(self.parameters(), lr=0.5)]

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(self.head(batch[0]), batch[1])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.kept)


def test_a_modules_own_optimizer_in_a_list_trains(runtime: RuntimeUnderTest) -> None:
    """An optimizer that the module makes in its constructor keeps the host's parameters."""
    module = MadeInList()
    before = module.head.weight.detach().clone()
    batches = [(torch.randn(8, 4), torch.randint(2, (8,)))] * 2
    Trainer(devices=1, runtime=runtime.name, log_dir=None, progress=False).fit(module, batches)
    assert not torch.equal(module.head.weight, before)
    assert module.kept[0].param_groups[0]["params"][0] is module.head.weight


class Tied(nn.Module):
    """Two layers that share a tensor, and a step that fails if they do not share it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.head = nn.Linear(4, 2)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        assert self.two.weight is self.one.weight
        return F.cross_entropy(self.head(self.two(self.one(batch[0]))), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _loader(records: int = 12, batch_size: int = 4) -> DataLoader[Any]:
    inputs = torch.randn(records, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size)


def _trainer(runtime: RuntimeUnderTest, **options: Any) -> Trainer:
    return Trainer(runtime=runtime.name, devices=1, log_dir=None, progress=False, **options)


def test_tied_weights_stay_tied(runtime: RuntimeUnderTest) -> None:
    """Tied weights are untied by the move to the device, or by the move back."""
    module = Tied()
    _trainer(runtime).fit(module, _loader())
    assert module.two.weight is module.one.weight
    assert len(list(module.parameters())) == 3


@pytest.mark.parametrize("name", ["16-true", "16-mixed", "fp16"])
def test_float16_is_refused(runtime: RuntimeUnderTest, name: str) -> None:
    """float16 is accepted, but float32 is computed."""
    with pytest.raises(UsageError, match="float16, which polyxla does not train in"):
        _trainer(runtime, precision=name).fit(Tied(), _loader())


def _dtypes(replica: Replica) -> tuple[str, bool]:
    import torch_xla

    module = replica.setup(nn.Linear(4, 2))
    with replica.precision.forward_context():
        result = module(replica.precision.convert_input(_on(replica, 3, 4)))
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([result])  # type: ignore[attr-defined]
    return str(module.weight.dtype), " f32[" in next(line for line in hlo.splitlines() if " dot(" in line)


@pytest.mark.torch_xla("torch_xla's autocast")
def test_precision_can_change_after_the_first_use_of_xla(runtime: RuntimeUnderTest) -> None:
    """bfloat16 after the first use of XLA has no effect: a process reads the setting once."""
    if runtime.name == "xrt":
        pytest.skip("the second launch runs in another process")
    assert runtime.launch(_dtypes, devices=1) == [("torch.float32", True)]
    assert runtime.launch(_dtypes, devices=1, precision="bf16-true") == [("torch.bfloat16", False)]
    assert runtime.launch(_dtypes, devices=1, precision="bf16-mixed") == [("torch.float32", False)]


def _memory(replica: Replica) -> Any:
    counters = replica.counters()
    assert counters is not None
    return counters.memory()


def test_the_devices_memory_can_be_read(runtime: RuntimeUnderTest) -> None:
    """Reading the device's memory raises a KeyError."""
    for memory in runtime.launch(_memory, devices=2):
        assert memory is not None
        assert 0 <= memory.used_bytes <= memory.limit_bytes


@dataclass(frozen=True)
class Found:
    """Any object of the user's."""

    path: Path
    words: tuple[str, ...]


def _broadcast(replica: Replica) -> Any:
    own = Found(Path("x" * (1 + 100 * replica.ordinal)), ("a",) * replica.ordinal)
    return replica.broadcast(own, source=1), replica.all_gather(own)[0]


def test_objects_of_any_kind_and_size_can_be_broadcast(runtime: RuntimeUnderTest) -> None:
    """Paths, the user's objects and objects of different sizes cannot be broadcast."""
    expected = (Found(Path("x" * 101), ("a",)), Found(Path("x"), ()))
    assert runtime.launch(_broadcast, devices=2) == [expected, expected]


def _draw(replica: Replica) -> list[Any]:
    draws = []
    for seed in (1, 1, 2):
        replica.seed_everything(seed)
        draws.append(torch.rand(4, device=replica.device).tolist())
    return draws


def test_a_seed_determines_the_devices_random_numbers(runtime: RuntimeUnderTest) -> None:
    """One seed gives different numbers on the device, and two seeds give the same numbers."""
    [(first, again, other)] = runtime.launch(_draw, devices=1, start_method="forkserver")
    assert first == again
    assert first != other
    # In a new process too.
    assert runtime.launch(_draw, devices=1, start_method="forkserver") == [[first, again, other]]


class Validated(Tied):
    """Logs the share of positive labels in validation."""

    log: Any

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("share", batch[1].float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_accumulation_and_metrics_are_exact_at_the_end_of_an_epoch(runtime: RuntimeUnderTest) -> None:
    """With 4 batches per step and 3 per epoch, gradients leak into the next epoch; metrics count repeats."""
    accumulated, whole = Validated(), Validated()
    whole.load_state_dict(accumulated.state_dict())
    trainer = _trainer(runtime, max_epochs=2, accumulate=4)
    metrics = trainer.fit(accumulated, _loader(), _loader(10))
    _trainer(runtime, max_epochs=2).fit(whole, _loader(12, 12))
    assert trainer.outcome is not None
    assert trainer.outcome.steps == 2
    assert torch.allclose(accumulated.head.weight, whole.head.weight, atol=1e-6)
    assert metrics["share"] == pytest.approx(_loader(10).dataset.tensors[1].float().mean().item())  # type: ignore[attr-defined]


def test_an_early_optimizer_trains_every_tied_parameter(runtime: RuntimeUnderTest) -> None:
    """Preparing a module unties it and leaves the optimizer with 3 of 4 parameters: one is not trained."""

    class EarlyOptimizer(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.5)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    module = EarlyOptimizer()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    _trainer(runtime).fit(module, _loader())
    assert module.two.weight is module.one.weight
    assert all(not torch.equal(value, before[name]) for name, value in module.state_dict().items())
