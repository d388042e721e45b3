"""The Trainer on one replica and on four: training, the way home of the module, errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from polyxla import UsageError
from polyxla_training import Trainer

if TYPE_CHECKING:
    from polyxla_testing import PluginInstaller

pytestmark = pytest.mark.usefixtures("fake_replicas")

PROGRAMS = Path(__file__).parent / "programs"


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


@REPLICAS
def test_it_trains_and_the_module_returns_to_the_host(devices: int) -> None:
    module, untrained = _Net(), _Net()
    trainer = _trainer(devices, max_epochs=10)
    assert trainer.fit(module, _data(8)) == {}
    losses = [net.training_step(_data(1, seed=1)[0]).item() for net in (module, untrained)]
    assert losses[0] < losses[1] / 10
    assert module.layer.weight.device.type == "cpu"
    assert type(module.layer.weight) is torch.nn.Parameter
    outcome = trainer.outcome
    assert outcome is not None
    assert (outcome.epochs, outcome.steps, outcome.world_size) == (10, 80 // devices, devices)
    assert (outcome.runtime, outcome.device) == ("fake", "FAKE")


def test_a_seed_determines_the_random_numbers_and_the_order_of_the_records(
    install_plugin: PluginInstaller,
) -> None:
    install_plugin.listener("shard", (PROGRAMS / "sampler_plugin.py").read_text())
    records = torch.linspace(0, 1, 16)[:, None]

    def run(seed: int) -> tuple[float, list[float]]:
        order: list[float] = []

        class Draws(_Net):
            def training_step(self, batch: Any) -> torch.Tensor:
                order.extend(batch[0][:, 0].tolist())
                self.log("draw", torch.rand(()), on_epoch=True)
                return super().training_step(batch)

        data = DataLoader(TensorDataset(records.repeat(1, 3), records), 4, shuffle=True)
        return _trainer(seed=seed).fit(Draws(), data)["draw"], order

    first, again, other = run(3), run(3), run(4)
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]
    assert sorted(first[1]) == sorted(other[1]) == records[:, 0].tolist()


@pytest.mark.parametrize(
    ("numbering", "host"), [("2,0,3,1", 0), ("0,1,4,5;2,3,6,7", 0), ("0,1,4,5;2,3,6,7", 1)]
)
def test_every_host_has_the_trained_parameters_however_replicas_are_numbered(
    numbering: str, host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = 1 + numbering.count(",") + numbering.count(";")
    monkeypatch.setenv("FAKE_DEVICES", str(devices))
    expected, module = _Net(), _Net()
    _trainer(devices, max_epochs=3).fit(expected, _data(8))
    monkeypatch.setenv("FAKE_NUMBERING", numbering)
    monkeypatch.setenv("FAKE_HOST", str(host))
    _trainer(devices, max_epochs=3).fit(module, _data(8))
    assert torch.equal(module.layer.weight, expected.layer.weight)
    assert not torch.equal(module.layer.weight, _Net().layer.weight)


def test_four_replicas_train_like_one_on_all_their_batches() -> None:
    batches = _data(8)
    whole = [
        (torch.cat([x for x, _ in batches[i : i + 4]]), torch.cat([y for _, y in batches[i : i + 4]]))
        for i in (0, 4)
    ]
    alone, together = _Net(), _Net()
    _trainer(1, max_epochs=3).fit(alone, whole)
    _trainer(4, max_epochs=3).fit(together, batches)
    assert torch.allclose(alone.layer.weight, together.layer.weight, atol=1e-6)
    assert not torch.allclose(alone.layer.weight, _Net().layer.weight, atol=1e-2)


class _Tied(_Net):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode = torch.nn.Linear(3, 3, bias=False)
        self.decode = torch.nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("seen", torch.zeros(()))
        self.moves = 0

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen += 1
        return F.mse_loss(self.decode(self.encode(batch[0])), batch[0])

    def on_post_move_to_device(self) -> None:
        self.moves += 1


@REPLICAS
def test_tied_weights_and_buffers_return_to_the_host(devices: int) -> None:
    module = _Tied()
    weight = module.encode.weight
    before = weight.detach().clone()
    _trainer(devices).fit(module, _data(8))
    assert module.decode.weight is module.encode.weight is weight
    assert not torch.equal(weight, before)
    assert module.seen.item() == 8 // devices
    assert module.moves == (2 if devices == 1 else 0), "there and back, or not this one"


@REPLICAS
def test_a_module_with_extra_state_returns_to_the_host(devices: int) -> None:
    class Counts(_Validated):
        batches = 0

        def training_step(self, batch: Any) -> torch.Tensor:
            self.batches += 1
            return super().training_step(batch)

        def get_extra_state(self) -> dict[str, int]:
            return {"batches": self.batches}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.batches = state["batches"]

    module, expected = Counts(), _Net()
    _trainer(devices).fit(module, _data(8))
    _trainer(devices).fit(expected, _data(8))
    assert module.batches == 8 // devices
    assert torch.equal(module.layer.weight, expected.layer.weight)
    assert _trainer(devices).test(module, UNEVEN) == {"test_mean": 24 / 8}


@REPLICAS
def test_no_lent_attribute_is_left(devices: int) -> None:
    module = _Validated()
    before = set(vars(module))
    _trainer(devices).fit(module, _data(4), [torch.ones(2)] * 4)
    assert set(vars(module)) == before


def test_lent_attributes_are_taken_back_after_an_error() -> None:
    class Fails(_Net):
        def training_step(self, batch: Any) -> torch.Tensor:
            raise ZeroDivisionError("in the step")

    module = Fails()
    before = set(vars(module))
    with pytest.raises(ZeroDivisionError) as caught:
        _trainer().fit(module, _data(1))
    assert set(vars(module)) == before
    assert caught.value.__notes__[0].startswith("raised in the replica with ordinal 0")


# Sizes 1, 3, 2, 2: a mean of means would be something else.
UNEVEN = [
    torch.tensor([8.0]),
    torch.tensor([0.0, 1.0, 2.0]),
    torch.tensor([4.0, 2.0]),
    torch.tensor([0.0, 7.0]),
]


class _Manual(_Net):
    automatic_optimization = False


class _Several(_Net):
    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        pytest.param(
            _Manual(),
            "_Manual sets automatic_optimization=False, which Trainer does not support",
            id="manual",
        ),
        pytest.param(_Several(), "configure_optimizers returned 2 optimizers: ", id="several-optimizers"),
        pytest.param(
            torch.nn.Linear(1, 1), "Linear has no training_step and no configure_optimizers", id="no-step"
        ),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(module: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        _trainer().fit(module, _data(1))
    assert str(caught.value).startswith(text)
    assert "polyxla.launch" in caught.value.fix


def test_a_module_without_a_test_step_is_refused() -> None:
    with pytest.raises(UsageError, match="_Net has no test_step"):
        _trainer().test(_Net(), _data(1))


def test_too_many_devices_are_refused_as_by_launch() -> None:
    with pytest.raises(UsageError, match=r"devices=9 asks for 9 devices, but runtime fake has 4 here"):
        _trainer(9).fit(_Net(), _data(1))


@REPLICAS
def test_debug_prints_the_runtimes_report_once(devices: int, capsys: pytest.CaptureFixture[str]) -> None:
    _trainer(devices, strategy="debug").fit(_Net(), _data(4))
    assert capsys.readouterr().out == f"fake runtime: replica 0 of {devices}\n"
    _trainer(devices).fit(_Net(), _data(4))
    assert capsys.readouterr().out == ""


@REPLICAS
def test_progress_counts_the_batches_of_one_replica(devices: int, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = _trainer(devices, max_epochs=2, progress=True, summary=False)
    trainer.fit(_Validated(), _data(4 * devices), UNEVEN)
    *said, summary = capsys.readouterr().err.splitlines()
    assert summary.startswith("polyxla: 8 steps in ")
    lines = [line.partition(" s: ")[0].rpartition(",")[0] for line in said]
    assert lines == [
        "polyxla: epoch 1/2, step 4",
        "polyxla: metrics, step 4",
        "polyxla: epoch 2/2, step 8",
        "polyxla: metrics, step 8",
    ]


@pytest.fixture
def _by_value() -> Iterator[None]:
    # Children cannot import a test module.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
@pytest.mark.usefixtures("_by_value")
def test_a_module_trained_in_another_process_returns() -> None:
    module = _Tied()
    before = module.encode.weight.detach().clone()
    trainer = _trainer(start_method="spawn")
    trainer.fit(module, _data(4))
    assert not torch.equal(module.encode.weight, before)
    assert module.decode.weight is module.encode.weight
    assert module.seen.item() == 4
    assert trainer.outcome is not None
    assert trainer.outcome.state is not None
