"""A training logs to Weights & Biases and to MLflow, by their own libraries, without a network."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from wandb.proto import wandb_internal_pb2

from polyxla_testing import RuntimeUnderTest
from polyxla_training import Trainer

# These libraries' own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Line(torch.nn.Module):
    """A line through the origin, whose gradient may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        self.fails = fails

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ZeroDivisionError
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("size", float(len(batch)))  # type: ignore[operator]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _fit(runtime: RuntimeUnderTest, loggers: Any, *, fails: bool = False, **options: Any) -> None:
    given = {"log_dir": None, "progress": False, "log_every_n_steps": 2, **options}
    trainer = Trainer(runtime=runtime.name, devices=1, loggers=loggers, **given)
    batches = torch.ones(5, 2, 1)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        trainer.fit(Line(fails=fails), list(batches), list(batches))


STEPS = [1, 2, 4, 5]
TIMEOUT_S = 60.0


@pytest.mark.parametrize("fails", [False, True])
def test_mlflow_has_the_settings_and_each_value(
    runtime: RuntimeUnderTest, tmp_path: Path, fails: bool
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    given = {"tracking_uri": uri, "experiment_name": "lines", "run_name": "one"}
    _fit(runtime, {"mlflow": given}, fails=fails)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("lines")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("one", "FAILED" if fails else "FINISHED")
    assert run.data.params["max_epochs"] == "1"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == (
        [] if fails else STEPS
    )
    sizes = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "size")]
    assert sizes == ([] if fails else [(5, 2.0)])


def _records(file: Path) -> Iterator[Any]:
    """Read the file in which wandb keeps an offline run until it is uploaded.

    Source: the format of LevelDB's log: blocks of 32 KiB with pieces of records, each after a checksum (4
    bytes), a length (2) and a kind (1 whole, 2 first, 3 middle, 4 last); wandb's header of 7 bytes is first.
    """
    data, at, pieces = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if at > len(data):
            return
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pieces)
            yield record
            pieces = b""


def _records_to_the_end(file: Path) -> list[Any]:
    """Wait for the record of the run's end: a process of wandb's writes the file, also after `finish`."""
    deadline = time.monotonic() + TIMEOUT_S
    records = list(_records(file))
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < deadline, records
        time.sleep(0.1)
        records = list(_records(file))
    return records


def test_wandb_has_the_settings_and_each_value_offline(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    given = {"project": "lines", "mode": "offline"}
    _fit(runtime, {"wandb": given, "csv": {}}, log_dir=str(tmp_path))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    losses, sizes = [], []
    settings: dict[str, str] = {}
    for record in _records_to_the_end(file):
        settings |= {item.key: item.value_json for item in record.run.config.update}
        items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "loss" in items:
            losses.append(int(items["_step"]))
        if "size" in items:
            sizes.append((int(items["_step"]), float(items["size"])))
    assert settings["max_epochs"] == "1"
    assert losses == STEPS
    assert sizes == [(5, 2.0)]
    assert "size" in (tmp_path / "metrics.csv").read_text()
