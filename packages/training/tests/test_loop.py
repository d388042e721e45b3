"""The training loop: epochs, limits, updates, evaluations, metrics and masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla import UsageError
from polyxla_testing import PluginInstaller
from polyxla_training import Trainer

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = pytest.mark.usefixtures("fake_replicas")


def _trainer(devices: int = 1, **options: Any) -> Trainer:
    return Trainer(**{"runtime": "fake", "devices": devices, "log_dir": None, "progress": False, **options})


def _data(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, 3, generator=generator)
    return [(x, x @ torch.tensor([[1.0], [-2.0], [0.5]])) for x in inputs]


class _Net(torch.nn.Module):
    # The Trainer lends it.
    log: Any
    log_dict: Any
    trainer: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return F.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Validated(_Net):
    """Its metrics are the means of what it reads, so that a test can know them."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("mean", batch.mean())
        self.log_dict({"first": batch[0], "size": float(len(batch))})

    def test_step(self, batch: torch.Tensor) -> None:
        self.log("test_mean", batch.mean())


REPLICAS = pytest.mark.parametrize("devices", [1, 4], ids=["1-replica", "4-replicas"])


# Sizes 1, 3, 2, 2: a mean of means would be something else.
UNEVEN = [
    torch.tensor([8.0]),
    torch.tensor([0.0, 1.0, 2.0]),
    torch.tensor([4.0, 2.0]),
    torch.tensor([0.0, 7.0]),
]


MEAN, FIRST = 24 / 8, (8 + 0 * 3 + 4 * 2 + 0 * 2) / 8


SIZE = (1 + 9 + 4 + 4) / 8


@REPLICAS
def test_metrics_are_weighted_by_records_exactly(devices: int) -> None:
    trainer = _trainer(devices)
    expected = {"mean": MEAN, "first": FIRST, "size": SIZE}
    assert trainer.fit(_Validated(), _data(4), UNEVEN) == expected
    assert trainer.metrics == expected
    assert trainer.test(_Validated(), UNEVEN) == {"test_mean": MEAN}
    assert trainer.metrics == {"test_mean": MEAN}


def test_each_epoch_is_validated_without_gradients_and_in_eval_mode() -> None:
    seen: list[tuple[bool, bool]] = []

    class Watches(_Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            seen.append((self.training, torch.is_grad_enabled()))
            return super().training_step(batch)

        def validation_step(self, batch: Any) -> None:
            seen.append((self.training, torch.is_grad_enabled()))

    _trainer(max_epochs=2).fit(Watches(), _data(1), _data(1))
    assert seen == [(True, True), (False, False)] * 2


def test_each_loader_is_divided_once(install_plugin: PluginInstaller) -> None:
    _trainer(4, max_epochs=3).fit(_Validated(), _data(8), UNEVEN)
    import every_nth

    assert sorted(every_nth.divided) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_values_of_training_steps_can_be_averaged_over_the_epoch() -> None:
    class Logs(_Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            loss = super().training_step(batch)
            self.log("step_only", loss)
            self.log("ones", 1, on_epoch=True)
            return loss

    assert _trainer(4).fit(Logs(), _data(8)) == {"ones": 1.0}


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        pytest.param({"max_epochs": 2}, 8, 2, id="epochs"),
        pytest.param({"max_epochs": 9, "max_steps": 6}, 6, 1, id="within-an-epoch"),
        pytest.param({"max_epochs": 9, "max_steps": 4}, 4, 1, id="at-an-epochs-end"),
        pytest.param({"max_epochs": 1, "max_steps": 99}, 4, 1, id="more-than-there-are"),
    ],
)
def test_training_ends_at_the_limit(options: dict[str, Any], steps: int, epochs: int) -> None:
    trainer = _trainer(**options)
    trainer.fit(_Net(), _data(4))
    assert trainer.outcome is not None
    assert (trainer.outcome.steps, trainer.outcome.epochs) == (steps, epochs)


class _Scheduled(_Net):
    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        halving = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        tenth = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.1)
        return [self.optimizer], [{"scheduler": halving, "interval": "step"}, tenth]


def test_schedules_advance() -> None:
    module = _Scheduled()
    _trainer(max_epochs=2).fit(module, _data(3))
    assert module.optimizer.param_groups[0]["lr"] == pytest.approx(0.5**6 * 0.1**2)


def test_training_without_any_data_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        _trainer().fit(_Net())
    assert str(caught.value) == (
        "there is nothing to train on (from Trainer.fit). "
        "Pass the train loader, or write train_dataloader in the module."
    )


def test_a_validation_loader_without_a_validation_step_is_refused_before_training() -> None:
    module = _Net()
    before = module.layer.weight.detach().clone()
    with pytest.raises(UsageError, match="_Net has no validation_step, but was given data for it"):
        _trainer().fit(module, _data(2), _data(2))
    assert torch.equal(module.layer.weight, before)


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        _trainer().fit(_Net(), [])
    assert str(caught.value) == (
        "the training loader gave no batch (from Trainer.fit). "
        "Check its dataset's length, and drop_last if the batch is larger than the dataset."
    )


@pytest.fixture
def _double(install_plugin: PluginInstaller) -> None:
    install_plugin.listener("double", (PROGRAMS / "double_precision.py").read_text())


@pytest.mark.usefixtures("_double")
@REPLICAS
def test_the_precision_policy_converts_the_module(devices: int) -> None:
    seen: list[torch.dtype] = []

    class Watches(_Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            seen.append(self.layer.weight.dtype)
            return super().training_step([tensor.double() for tensor in batch])

    _trainer(devices, precision=64).fit(Watches(), _data(4))
    assert set(seen) == {torch.float64}


class _Endless:
    """A loader that does not know its length."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from _data(1)


def test_an_optimizer_that_needs_a_closure_is_refused_before_training() -> None:
    class Closure(_Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(UsageError, match="LBFGS computes the loss several times in one step, and the"):
        _trainer().fit(Closure(), _data(1))


class _Empty(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@REPLICAS
@pytest.mark.parametrize("data", [UNEVEN[:0], DataLoader(_Empty())], ids=["sized", "stream"])
def test_an_evaluation_of_nothing_is_an_error(devices: int, data: Any) -> None:
    skip = "; to train without validation, leave it out"
    message = (
        "the {} loader gave no batch (from Trainer). Check its dataset's length, and drop_last if the batch "
        "is larger than the dataset{}."
    )
    for method, loaders, name, more in (
        ("validate", [data], "validation", skip),
        ("test", [data], "test", ""),
        ("fit", [_data(4), data], "validation", skip),
    ):
        with pytest.raises(UsageError) as caught:
            getattr(_trainer(devices), method)(_Validated(), *loaders)
        assert str(caught.value) == message.format(name, more)


class _One(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(UNEVEN[:1])


@REPLICAS
def test_fewer_batches_than_replicas_are_an_evaluation(devices: int) -> None:
    assert _trainer(devices).validate(_Validated(), DataLoader(_One(), batch_size=None))["mean"] == 8.0


def test_a_loader_without_a_length_trains_to_the_step_limit(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = _trainer(max_steps=5, progress=True, summary=False)
    trainer.fit(_Validated(), _Endless(), UNEVEN)
    assert trainer.outcome is not None
    assert trainer.outcome.steps == 5
    assert capsys.readouterr().err.startswith("polyxla: metrics, step 5, ")


def tiny(records: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(records, 4), torch.zeros(records).long()), batch_size=4)


class Counting:
    """Stands for a metric object: torchmetrics' has these methods too."""

    def __init__(self) -> None:
        self.right = self.seen = 0

    def compute(self) -> float:
        return self.right / self.seen

    def reset(self) -> None:
        self.right = self.seen = 0


class Measured(torch.nn.Module):
    def __init__(self, logged: Any) -> None:
        super().__init__()
        self.logged = logged

    def test_step(self, batch: Any) -> None:
        if isinstance(self.logged, Counting):
            self.logged.right += 1
            self.logged.seen += 2
        self.log("accuracy", self.logged)  # type: ignore[operator]


def test_a_metric_object_is_computed_and_reset() -> None:
    metric = Counting()
    module = Measured(metric)
    module.logged = metric
    assert _trainer().test(module, tiny()) == {"accuracy": 0.5}
    assert metric.seen == 0


def test_metric_objects_of_several_replicas_are_refused() -> None:
    with pytest.raises(UsageError, match="metric objects cannot be combined over 2 replicas"):
        _trainer(2).test(Measured(Counting()), tiny())


@pytest.mark.parametrize(
    ("value", "kind"),
    [(torch.ones(3), r"a tensor of shape \(3,\)"), ("high", "'high'")],
    ids=["tensor", "text"],
)
def test_values_of_other_types_cannot_be_logged(value: Any, kind: str) -> None:
    with pytest.raises(UsageError, match=f"'accuracy' is logged as {kind}"):
        _trainer().test(Measured(value), tiny())


def test_gradients_are_reduced_once_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyxla_testing import fake

    reduced: list[int] = []
    average = fake._FakeReplication.average

    def counted(self: Any, tensors: Sequence[torch.Tensor]) -> None:
        reduced.append(self.world.ordinal)
        average(self, tensors)

    monkeypatch.setattr(fake._FakeReplication, "average", counted)
    trainer = _trainer(4, accumulate=2)
    trainer.fit(_Net(), _data(12))
    # Each replica has three batches: an update of two, and an update of the rest.
    assert trainer.outcome is not None
    assert trainer.outcome.steps == 2
    assert sorted(reduced) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_last_update_of_an_epoch_averages_the_batches_that_are_left() -> None:
    halves, alone = _Net(), _Net()
    _trainer(accumulate=2).fit(halves, _data(3))
    batches = _data(3)
    pair = tuple(torch.cat([batches[0][part], batches[1][part]]) for part in (0, 1))
    _trainer().fit(alone, [pair, batches[2]])
    assert torch.allclose(halves.layer.weight, alone.layer.weight, atol=1e-6)


class _Asks(_Net):
    """Has steps with a mask."""

    masks: list[list[bool]]

    def training_step(self, batch: Any, valid: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.masks.append(valid.tolist())
        return torch.where(valid, (self.layer(batch[0]) - batch[1]).square()[:, 0], 0.0).sum()

    def validation_step(self, batch: Any, batch_idx: int, valid: torch.Tensor) -> None:
        # Padding records may have any value.
        self.log("mean", torch.where(valid, batch[0][:, 0], torch.inf))


def test_a_step_with_a_mask_gets_batches_of_one_shape() -> None:
    module = _Asks()
    module.masks = []
    inputs = torch.arange(15.0).view(5, 3)
    loader = DataLoader(TensorDataset(inputs, torch.zeros(5, 1)), batch_size=3)
    metrics = _trainer().fit(module, loader, loader)
    assert module.masks == [[True, True, True], [True, True, False]]
    assert metrics == {"mean": inputs[:, 0].mean().item()}


def test_an_error_of_a_precision_policy_names_the_policy() -> None:
    class Refuses:
        name = "choosy"

        def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
            raise ValueError("keep_float32='haed' matches no module; did you mean 'head'?")

        def forward_context(self) -> Any: ...

        def describe(self) -> str:
            return ""

    with pytest.raises(UsageError, match=r"did you mean 'head'\? \(from precision choosy\)"):
        _trainer(precision=Refuses()).fit(_Net(), _data(1))


def test_every_replica_receives_metrics_that_hold_for_all(install_plugin: PluginInstaller) -> None:
    install_plugin.listener("recorder", (PROGRAMS / "metrics_recorder.py").read_text())
    _trainer(4, max_epochs=2).fit(_Validated(), _data(8), UNEVEN)
    import recorder  # type: ignore[import-not-found]

    metrics = {"mean": MEAN, "first": FIRST, "size": SIZE}
    assert sorted(recorder.received) == [(ordinal, step) for ordinal in range(4) for step in (2, 4)]
    assert list(recorder.received.values()) == [metrics] * 8
    assert sorted(recorder.finished) == [(ordinal, epoch) for ordinal in range(4) for epoch in (1, 2)]
