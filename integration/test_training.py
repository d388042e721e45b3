"""The Trainer's features on a real runtime: one replica in this process, four in other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla import UsageError
from polyxla.plugin import STEP_EVENT
from polyxla_precision import BF16True
from polyxla_testing import RuntimeUnderTest
from polyxla_training import CheckpointFolder, Trainer


class Net(nn.Module):
    """A linear model with three inputs; logs metrics."""

    log: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        # TorchTPU's mse_loss, unlike torch's, refuses operands of different dtypes.
        return F.mse_loss(self.layer(batch[0]).float(), batch[1].float())

    def validation_step(self, batch: Any) -> None:
        self.log("by_batch", batch[1].mean())
        self.log("by_record", batch[1][:, 0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EarlyOptimizer(Net):
    """Creates its optimizer in the constructor, as users do."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


class Masked(Net):
    """Gets padded batches with their mask."""

    def training_step(self, batch: Any, valid: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        errors = (self.layer(batch[0]) - batch[1]).square()[:, 0]
        return torch.where(valid, errors, 0.0).sum() / valid.sum()

    def validation_step(self, batch: Any, valid: torch.Tensor) -> None:  # type: ignore[override]
        self.log("by_record", batch[1][:, 0])


def data(count: int = 22, batch_size: int = 4) -> DataLoader[Any]:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, torch.arange(float(count))[:, None]), batch_size)


def fit(
    runtime: RuntimeUnderTest, module: nn.Module, *loaders: Any, devices: int = 1, **options: Any
) -> Trainer:
    trainer = Trainer(runtime=runtime.name, devices=devices, log_dir=None, progress=False, **options)
    trainer.fit(module, *loaders)
    return trainer


@pytest.mark.parametrize("devices", [1, 4], ids=["1-replica", "4-replicas"])
def test_metrics_are_exact_if_records_do_not_divide_evenly(runtime: RuntimeUnderTest, devices: int) -> None:
    # 22 records in batches of 4: of four replicas two have 6 records and two have 5.
    found = fit(runtime, Net(), data(), data(), devices=devices).metrics
    assert found == {"by_batch": pytest.approx(10.5), "by_record": pytest.approx(10.5)}


@pytest.mark.parametrize("devices", [1, 4], ids=["1-replica", "4-replicas"])
def test_masked_metrics_are_exact_too(runtime: RuntimeUnderTest, devices: int) -> None:
    assert fit(runtime, Masked(), data(), data(), devices=devices).metrics == {
        "by_record": pytest.approx(10.5)
    }


def test_padded_batches_with_a_mask_train_like_uneven_batches(runtime: RuntimeUnderTest) -> None:
    uneven, masked = Net(), Masked()
    fit(runtime, uneven, data())
    fit(runtime, masked, data())
    assert torch.allclose(uneven.layer.weight, masked.layer.weight, atol=1e-6)


@pytest.mark.parametrize(("accumulate", "batch_size"), [(4, 2), (3, 4)], ids=["divides", "flushed"])
def test_accumulated_batches_train_like_large_batches(
    runtime: RuntimeUnderTest, accumulate: int, batch_size: int
) -> None:
    large, small = Net(), Net()
    # 16 records: batches of 4 make an update of three batches and an update of one.
    whole = fit(runtime, large, data(16, accumulate * batch_size), max_epochs=2)
    parts = fit(runtime, small, data(16, batch_size), max_epochs=2, accumulate=accumulate)
    assert whole.outcome is not None
    assert parts.outcome is not None
    assert parts.outcome.steps == whole.outcome.steps == 4
    assert torch.allclose(large.layer.weight, small.layer.weight, atol=1e-5)


@pytest.mark.parametrize(("option", "limit"), [("clip_norm", 0.1), ("clip_value", 0.01)])
def test_clipping_limits_the_update(runtime: RuntimeUnderTest, option: str, limit: float) -> None:
    module, untouched, options = Net(), Net(), dict[str, Any]({option: limit})
    fit(runtime, module, data(), max_steps=1, **options)
    pairs = zip(module.parameters(), untouched.parameters(), strict=True)
    moved = torch.cat([(ours - theirs).detach().flatten() for ours, theirs in pairs])
    # All gradients are above both limits, and the learning rate is 0.1.
    sizes = [moved.norm().item()] if option == "clip_norm" else moved.abs().tolist()
    assert sizes == pytest.approx([0.1 * limit] * len(sizes), rel=1e-3)


def test_an_optimizer_created_before_the_move_trains_and_moves_back(runtime: RuntimeUnderTest) -> None:
    module, untouched = EarlyOptimizer(), Net()
    fit(runtime, module, data())
    assert not torch.equal(module.layer.weight, untouched.layer.weight)
    [group] = module.optimizer.param_groups
    assert [id(parameter) for parameter in group["params"]] == [
        id(parameter) for parameter in module.parameters()
    ]
    assert {state["exp_avg"].device.type for state in module.optimizer.state.values()} == {"cpu"}
    # It continues on the host.
    before = module.layer.weight.detach().clone()
    module.training_step(next(iter(data()))).backward()
    module.optimizer.step()
    assert not torch.equal(module.layer.weight, before)


def test_an_optimizer_of_another_modules_parameters_is_refused(runtime: RuntimeUnderTest) -> None:
    class Unrelated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)

        configure_optimizers = EarlyOptimizer.configure_optimizers

    with pytest.raises(UsageError, match="only 0 of the 2 parameters of SGD belong to Unrelated"):
        fit(runtime, Unrelated(), data())


@pytest.mark.parametrize(("name", "dtype"), [("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)])
def test_bfloat16_trains(runtime: RuntimeUnderTest, name: str, dtype: torch.dtype) -> None:
    module, untouched = Net(), Net()
    fit(runtime, module, data(), precision=name)
    assert module.layer.weight.dtype == dtype
    assert not torch.equal(module.layer.weight.float(), untouched.layer.weight)


def test_a_configured_policy_keeps_modules_in_float32(runtime: RuntimeUnderTest) -> None:
    module = nn.Sequential(Net(), nn.Linear(2, 2))
    net: Any = module[0]
    module.training_step, module.configure_optimizers = net.training_step, net.configure_optimizers
    fit(runtime, module, data(), precision=BF16True(keep_float32=("0.layer",)))
    assert [parameter.dtype for parameter in module.parameters()] == [torch.float32] * 2 + [
        torch.bfloat16
    ] * 2


@pytest.mark.slow
def test_four_replicas_resume_as_two(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "checkpoint_dir": tmp_path,
        "resume": "auto",
        "save_every_n_steps": 1,
        "keep": 3,
    }
    fit(runtime, Net(), data(32, 2), devices=4, max_steps=2, **options)
    assert [entry.step for entry in CheckpointFolder(tmp_path).entries()] == [1, 2]
    trainer = fit(runtime, Net(), data(32, 2), devices=2, **options)
    # 8 of the 16 batches were used; two replicas share the other 8.
    assert trainer.outcome is not None
    assert (trainer.outcome.steps, trainer.outcome.epochs) == (2 + 4, 1)
    assert len(CheckpointFolder(tmp_path).entries()) == 3


@pytest.mark.parametrize(("steps", "log_dir"), [((2, 4), "here"), ((1, 2), None)])
def test_steps_can_be_profiled(
    runtime: RuntimeUnderTest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: tuple[int, int],
    log_dir: str | None,
) -> None:
    from jax.profiler import ProfileData

    monkeypatch.chdir(tmp_path)
    options = {"runtime": runtime.name, "devices": 1, "progress": False}
    Trainer(log_dir=log_dir, profile_steps=steps, **options).fit(Net(), data())  # type: ignore[arg-type]
    [trace] = tmp_path.rglob("*.xplane.pb")
    assert trace.is_relative_to(tmp_path / (log_dir or "runs") / "profile")
    events = [
        event
        for plane in ProfileData.from_file(str(trace)).planes
        for line in plane.lines
        for event in line.events
        if event.name == STEP_EVENT
    ]
    assert [dict(event.stats)["step_num"] for event in events] == [*range(steps[0], steps[1] + 1)]
    assert all(event.duration_ns > 0 for event in events)
