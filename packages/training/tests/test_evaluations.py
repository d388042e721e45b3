"""`Trainer.validate` and `Trainer.predict`, on one replica and on several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from polyxla import UsageError
from polyxla_testing import PluginInstaller
from polyxla_training import Trainer

PROGRAMS = Path(__file__).parent / "programs"
REPLICAS = pytest.mark.parametrize("devices", [1, 3, 4], ids=["1-replica", "3-replicas", "4-replicas"])


@pytest.fixture(autouse=True)
def _fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin.hide_others(keep=["polyxla-training", "polyxla-sampler"])
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "4")


def _trainer(devices: int = 1, **options: Any) -> Trainer:
    return Trainer(**{"runtime": "fake", "devices": devices, "log_dir": None, "progress": False, **options})


class _Doubles(torch.nn.Module):
    log: Any

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("mean", batch[0])

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        return {"doubled": 2 * batch[0], "index": batch_idx}


def _loader(records: int = 19, **options: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(float(records)))
    return DataLoader(data, **{"batch_size": 2, **options})


@REPLICAS
def test_validate_returns_the_means_over_all_records(devices: int) -> None:
    trainer = _trainer(devices)
    assert trainer.validate(_Doubles(), _loader()) == {"mean": 9.0}
    assert trainer.metrics == {"mean": 9.0}
    assert trainer.outcome is not None
    assert (trainer.outcome.steps, trainer.outcome.epochs) == (0, 0)


@REPLICAS
def test_predictions_have_the_loaders_batches_and_order(devices: int) -> None:
    found = _trainer(devices).predict(_Doubles(), _loader())
    batches = torch.arange(19.0).split(2)
    assert len(found) == len(batches)
    for prediction, batch in zip(found, batches, strict=True):
        assert torch.equal(prediction["doubled"], 2 * batch)
    assert [prediction["index"] for prediction in found] == [index // devices for index in range(10)]


@REPLICAS
def test_predictions_need_fewer_batches_than_replicas_and_obey_the_limit(devices: int) -> None:
    (only,) = _trainer(devices).predict(_Doubles(), _loader(2))
    assert only["doubled"].tolist() == [0.0, 2.0]
    assert len(_trainer(devices, limit_predict_batches=1).predict(_Doubles(), _loader())) == devices


class _Masked(torch.nn.Module):
    shapes: list[int]

    def predict_step(self, batch: list[torch.Tensor], valid: torch.Tensor) -> torch.Tensor:
        self.shapes.append(len(batch[0]))
        return batch[0] + 1


@REPLICAS
def test_predictions_for_padding_are_left_out(devices: int) -> None:
    module = _Masked()
    module.shapes = []
    found = _trainer(devices).predict(module, _loader(5))
    if devices == 1:
        assert module.shapes == [2, 2, 2]
    assert [prediction.tolist() for prediction in found] == [[1.0, 2.0], [3.0, 4.0], [5.0]]


class _Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ([2 * values] for (values,) in super().__iter__())


@REPLICAS
def test_the_batches_of_a_loaders_own_class_are_predicted(devices: int) -> None:
    loader = _Doubling(TensorDataset(torch.arange(4.0)), batch_size=2)
    found = _trainer(devices).predict(_Doubles(), loader)
    assert [prediction["doubled"].tolist() for prediction in found] == [[0.0, 4.0], [8.0, 12.0]]


class _Counts(torch.nn.Module):
    log: Any

    def validation_step(self, texts: list[str]) -> None:
        self.log("letters", sum(map(len, texts)), reduce_fx="sum")

    def predict_step(self, texts: list[str]) -> list[str]:
        return texts


@REPLICAS
def test_no_text_is_evaluated_twice(devices: int) -> None:
    texts: Any = ["a", "bb", "ccc", "dddd", "eeeee"]
    found = _trainer(devices).validate(_Counts(), DataLoader(texts, batch_size=2))
    assert found == {"letters": 15}
    batches = _trainer(devices).predict(_Counts(), DataLoader(texts, batch_size=2))
    assert batches == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([[value] for value in torch.arange(8.0)])


def test_records_of_a_stream_are_divided_one_by_one() -> None:
    found = _trainer(2).predict(_Doubles(), DataLoader(_Stream(), batch_size=2))
    values = [prediction["doubled"].tolist() for prediction in found]
    assert values == [[0.0, 4.0], [2.0, 6.0], [8.0, 12.0], [10.0, 14.0]]


class _Counted(IterableDataset[Any]):
    """Ten records, which the workers divide; with a length, of which the batches of two workers are more."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(
            [[value] for value in torch.arange(10.0)][
                info.id if info else 0 :: info.num_workers if info else 1
            ]
        )


@REPLICAS
@pytest.mark.parametrize("workers", [0, 2])
def test_every_record_of_a_stream_is_evaluated_once(devices: int, workers: int) -> None:
    loader = DataLoader(_Counted(), batch_size=4, num_workers=workers)
    assert _trainer(devices).validate(_Doubles(), loader) == {"mean": 4.5}
    found = _trainer(devices).predict(_Doubles(), loader)
    values = [value for prediction in found for value in prediction["doubled"].tolist()]
    assert sorted(values) == [2.0 * record for record in range(10)]


@pytest.mark.parametrize(("limit", "batches"), [(1, 1), (4, 4), (9, 4), (0.7, 2)])
def test_a_limit_counts_the_batches_of_a_stream(limit: float, batches: int) -> None:
    loader = DataLoader(_Counted(), batch_size=4, num_workers=2)
    assert len(_trainer(limit_predict_batches=limit).predict(_Doubles(), loader)) == batches


class _Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.flags: list[bool] = []

    def forward(self, batch: Any) -> torch.Tensor:
        self.flags += [self.trainer.predicting, self.training, torch.is_grad_enabled()]
        out: torch.Tensor = self.layer(batch[0][:, None])
        return out

    def predict_dataloader(self) -> DataLoader[Any]:
        return _loader(4)


def test_a_lightning_module_predicts_with_its_forward() -> None:
    module = _Lit()
    found = _trainer().predict(module)
    assert module.flags == [True, False, False] * 2
    assert module.training
    expected = torch.nn.functional.linear(torch.arange(4.0)[:, None], module.layer.weight, module.layer.bias)
    assert torch.equal(torch.cat(found), expected)


def test_without_data_or_a_step_nothing_is_started() -> None:
    with pytest.raises(UsageError) as caught:
        _trainer().validate(_Doubles())
    assert str(caught.value) == (
        "there is nothing to validate on (from Trainer.validate). "
        "Pass the val loader, or write val_dataloader in the module."
    )
    with pytest.raises(UsageError, match="Linear has no predict_step"):
        _trainer().predict(torch.nn.Linear(1, 1), _loader())


class _Bfloat16:
    """A policy that computes in bfloat16."""

    name = "half"

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def forward_context(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    def convert_input(self, batch: Any) -> Any:
        return batch

    def convert_output(self, value: torch.Tensor) -> torch.Tensor:
        return value.float()

    def describe(self) -> str:
        return ""


def test_predictions_are_float32_though_the_policy_computes_in_less() -> None:
    found = _trainer(precision=_Bfloat16()).predict(_Lit(), _loader(4))
    assert {prediction.dtype for prediction in found} == {torch.float32}
