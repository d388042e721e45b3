"""The state of a training: what it holds, and what another number of replicas takes from it."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyxla import UsageError
from polyxla.plugin import Loader
from polyxla_training import CheckpointError, CheckpointFolder, load, save
from polyxla_training.lightning.schedulers import Schedulers
from polyxla_training.loop.state import TrainingState
from polyxla_training.metrics import MetricAccumulator, Total
from polyxla_training.progress import Progress
from polyxla_training.resume import FORMAT, Checkpoint, find_checkpoint


class FakeReplica:
    """Stands for ordinal `ordinal` of `world_size`: the others have the same state."""

    def __init__(self, world_size: int = 1, ordinal: int = 0, precision: str = "32") -> None:
        self.world_size, self.ordinal, self.steps = world_size, ordinal, 0
        self.is_first = ordinal == 0
        self.precision = SimpleNamespace(name=precision)
        self.sharding = None
        self.restored: Any = None
        self.seeded: int | None = None

    def rng_state(self) -> dict[str, Any]:
        return {"device": 7 + self.ordinal}

    def restore_rng(self, state: Any) -> None:
        self.restored = state

    def seed_everything(self, seed: int) -> None:
        self.seeded = seed

    def all_gather(self, value: Any) -> list[Any]:
        return [copy.deepcopy(value) for _ in range(self.world_size)]

    def broadcast(self, value: Any) -> Any:
        return value


class FakeLoader:
    position: Any = None
    batches_before = 3

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 2, "batches": 3}

    def load_state_dict(self, state: Any) -> None:
        self.position = state


def _state(replica: Any, module: torch.nn.Module | None = None) -> TrainingState:
    module = module or torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    schedulers = Schedulers([torch.optim.lr_scheduler.StepLR(optimizer, 1)])
    loader: Any = FakeLoader()
    assert not isinstance(loader, Loader)
    return TrainingState(
        replica=replica,
        module=module,
        optimizer=optimizer,
        schedulers=schedulers,
        loader=loader,
        metrics=MetricAccumulator(),
        progress=Progress(),
        seed=4,
    )


def _trained(world_size: int = 1) -> TrainingState:
    state = _state(FakeReplica(world_size))
    state.module(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.schedulers.epoch_finished()
    state.metrics.start_batch(torch.zeros(4, 2), is_training=True)
    state.metrics.log("loss", 2.0, on_epoch=True)
    state.progress.epoch, state.replica.steps = 2, 11
    return state


def _totals(state: TrainingState) -> dict[str, Total]:
    return state.metrics.state_dict()


def test_a_state_that_was_loaded_is_the_state_that_was_saved() -> None:
    trained = _trained()
    saved = copy.deepcopy(trained.state_dict())
    other = _state(FakeReplica())
    checkpoint = Checkpoint("a test", saved)
    other.resume(checkpoint)
    other.resume_streams(checkpoint)
    assert torch.equal(other.module.weight, trained.module.weight)  # type: ignore[arg-type]
    momentum = [state.optimizer.state_dict()["state"][0]["momentum_buffer"] for state in (trained, other)]
    assert torch.equal(*momentum)
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert (other.progress.epoch, other.progress.step, other.replica.steps) == (2, 11, 11)
    assert other.loader.position == {"epoch": 2, "batches": 3}  # type: ignore[attr-defined]
    assert _totals(other) == {"loss": (8.0, 4.0, "mean")}
    assert other.replica.restored == {"device": 7}  # type: ignore[attr-defined]
    assert (saved["seed"], saved["world_size"], saved["precision"]) == (4, 1, "32")


@pytest.mark.parametrize("ordinal", [0, 1])
def test_other_replicas_count_the_totals_once_and_draw_from_new_streams(ordinal: int) -> None:
    saved = copy.deepcopy(_trained(world_size=4).state_dict())
    other = _state(FakeReplica(world_size=2, ordinal=ordinal))
    other.resume_streams(Checkpoint("a test", saved))
    assert _totals(other) == ({"loss": (32.0, 16.0, "mean")} if ordinal == 0 else {})
    assert other.replica.restored is None  # type: ignore[attr-defined]
    assert other.replica.seeded is not None  # type: ignore[attr-defined]


def test_another_precision_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    _state(FakeReplica(precision="bf16")).resume(Checkpoint("run/step-11", _trained().state_dict()))
    assert capsys.readouterr().err == (
        "polyxla: run/step-11 was saved with precision 32; training continues with bf16\n"
        "polyxla: resumed from run/step-11: epoch 2, step 11\n"
    )


def test_another_module_is_refused_with_the_names_of_its_tensors() -> None:
    other = _state(FakeReplica(), torch.nn.Sequential(torch.nn.Linear(2, 1)))
    with pytest.raises(CheckpointError, match=r"missing: 0\.weight, 0\.bias.*a test"):
        other.resume(Checkpoint("a test", _trained().state_dict()))


def test_another_optimizer_is_refused() -> None:
    saved = copy.deepcopy(_trained().state_dict())
    saved["optimizer"]["param_groups"] = []
    with pytest.raises(CheckpointError, match="the optimizer or its schedules do not fit"):
        _state(FakeReplica()).resume(Checkpoint("a test", saved))


def test_auto_resumes_from_the_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (3, 11):
        path = folder.save(step, _trained().state_dict())
    state = _state(FakeReplica())
    found = find_checkpoint(state.replica, "auto", tmp_path)
    assert found is not None
    state.resume(found)
    assert state.progress.step == load(path)["step"] == 11
    assert capsys.readouterr().err == f"polyxla: resumed from {path}: epoch 2, step 11\n"


def test_auto_without_a_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    replica: Any = FakeReplica()
    assert find_checkpoint(replica, "auto", tmp_path) is None


@pytest.mark.parametrize("content", [{"format": FORMAT + 1}, [1], {}], ids=["version", "list", "empty"])
def test_a_file_of_another_format_is_refused(tmp_path: Path, content: Any) -> None:
    save(content, tmp_path / "other")
    replica: Any = FakeReplica()
    with pytest.raises(UsageError, match=r"other is not a checkpoint of a Trainer of this version") as caught:
        find_checkpoint(replica, tmp_path / "other", None)
    assert caught.value.where == f"resume={str(tmp_path / 'other')!r}"
