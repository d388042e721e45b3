"""check_replicas on the fake runtime: training, comparison, errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typer import Typer
from typer.testing import CliRunner

from polyxla import UsageError
from polyxla_testing import PluginInstaller
from polyxla_training import ReplicaCheck, check_replicas, plugin
from polyxla_training.replica_check import load_factory
from polyxla_training.replica_runs import compare, prepare

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(autouse=True)
def _fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_plugin.hide_others(keep=["polyxla-training"])
    install_plugin.fake_runtime()
    (install_plugin.directory / "toy_module.py").write_text((PROGRAMS / "toy_module.py").read_text())
    monkeypatch.setenv("FAKE_DEVICES", "4")
    monkeypatch.chdir(tmp_path)
    # The command looks for modules in the working directory.
    monkeypatch.setattr(sys, "path", list(sys.path))


def _records(count: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


class Classifier(nn.Sequential):
    """As a user writes it for Trainer; its loader shuffles."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__(nn.Linear(4, 8), *between, nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: list[torch.Tensor], index: int) -> dict[str, torch.Tensor]:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)  # type: ignore[operator]
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_records(), 4, shuffle=True)


def _lit() -> nn.Module:
    """Make a module as a Lightning user writes it, without data."""
    # Imported here and not by every process that a test starts, which would take seconds.
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.head(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Lit()


class Plain(nn.Linear):
    """No method of Trainer's; what it takes is shown by its example."""

    example_input_array = torch.zeros(1, 4)

    def __init__(self) -> None:
        super().__init__(4, 2)


class Summed(Plain):
    """Its gradient grows with the batch, and each replica's batch is a share."""

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self(batch).square().sum()
        return loss


def _checked(make: Callable[[], nn.Module], batches: Any = None, **options: Any) -> ReplicaCheck:
    return check_replicas(make, batches, runtime="fake", **{"steps": 3, "batch_size": 8, **options})


def test_products_are_compared_on_an_emulated_tpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYXLA_EMULATE", raising=False)
    with pytest.raises(UsageError, match="no TPU is emulated whose products could be compared") as refused:
        _checked(Plain, numerics=True)
    assert refused.value.fix == "Set POLYXLA_EMULATE=v5e-1."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "batches"),
    [
        pytest.param(Classifier, None, id="for-trainer", marks=pytest.mark.long),
        pytest.param(_lit, DataLoader(_records(), 4), id="lightning"),
        pytest.param(Plain, None, id="plain", marks=pytest.mark.long),
        pytest.param(
            Plain, [torch.ones(4, 4), torch.ones(8, 4) / 2], id="uneven-batches", marks=pytest.mark.long
        ),
    ],
)
def test_several_replicas_train_like_one(make: Any, batches: Any) -> None:
    found = _checked(make, batches)
    assert (found.devices, found.steps, found.within) == (4, 3, True)
    assert found.differences.keys() == dict(make().named_parameters()).keys()
    assert found.difference == max(found.differences.values()) < 1e-6
    assert found.warnings == ()
    assert "3 steps on 4 replicas and on one" in str(found)
    assert "within 1e-05" in str(found)


@pytest.mark.slow
def test_a_loss_that_is_a_sum_is_detected() -> None:
    found = _checked(Summed)
    assert not found.within
    assert found.difference > 0.01
    assert found.worst in {"weight", "bias"}
    assert f"of {found.worst}, beyond 1e-05" in str(found)


@pytest.mark.slow
def test_batch_norm_is_named_and_differs() -> None:
    found = _checked(lambda: Classifier(nn.BatchNorm1d(8)))
    assert not found.within
    [warning] = found.warnings
    assert warning.startswith("not comparable: 1 (BatchNorm1d) normalises each replica's share separately")


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (nn.Dropout(0.5), ["1 (Dropout)"]),
        (nn.Dropout(0.0), []),
        (nn.MultiheadAttention(8, 2, dropout=0.1), ["1 (MultiheadAttention)"]),
        (nn.LSTM(8, 8, num_layers=2, dropout=0.1), ["1 (LSTM)"]),
        (nn.SyncBatchNorm(8), []),
    ],
)
def test_modules_that_differ_by_design_are_named(part: nn.Module, named: list[str]) -> None:
    warnings = prepare(lambda: Classifier(part), None, 1, 4, 8).warnings
    assert len(warnings) == len(named)
    assert all(name in warning for name, warning in zip(named, warnings, strict=True))


class TestBatches:
    def test_come_in_the_order_of_the_dataset_and_repeat(self) -> None:
        work = prepare(Classifier, None, 6, 4, 8)
        inputs, labels = _records().tensors
        assert [len(batch[0]) for batch in work.batches] == [8] * 6
        assert torch.equal(work.batches[1][0], inputs[8:16].float())
        assert torch.equal(work.batches[5][1], labels[:8])

    def test_of_an_iterable_dataset_are_rebatched(self) -> None:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Iterator[torch.Tensor]:
                return iter(torch.arange(80.0).reshape(20, 4))

        work = prepare(Plain, DataLoader(Stream(), 3), 2, 4, 8)
        assert [batch.shape for batch in work.batches] == [(8, 4), (8, 4)]

    def test_are_float32_and_the_same_every_time(self) -> None:
        one, other = (prepare(Plain, None, 2, 4, 8) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(one.batches, other.batches, strict=True))
        assert torch.equal(one.module.weight, other.module.weight)  # type: ignore[arg-type]
        double = prepare(lambda: Plain().double(), None, 1, 4, 8)
        assert double.module.weight.dtype == double.batches[0].dtype == torch.float32

    def test_leave_the_callers_random_numbers_alone(self) -> None:
        torch.manual_seed(5)
        wanted = torch.rand(1)
        torch.manual_seed(5)
        prepare(Plain, None, 1, 4, 8)
        assert torch.equal(torch.rand(1), wanted)

    def test_are_divided_by_ordinal_except_tensors_without_records(self) -> None:
        from polyxla_training.replica_runs import _share

        batch = {"x": torch.arange(8), "mask": torch.ones(3), "scale": torch.tensor(2.0), "name": "kept"}
        share = _share(batch, 1, 4)
        assert share["x"].tolist() == [2, 3]
        assert share["mask"].shape == (3,)
        assert (share["scale"].item(), share["name"]) == (2.0, "kept")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0 is not an integer of at least 1"),
        ({"devices": 1}, "devices=1 is not an integer of at least 2"),
        ({"batch_size": 10}, "a batch of 10 does not divide among 4 replicas .* Write batch_size=32"),
        ({"batches": [torch.ones(6, 4)]}, "a batch of 6 records does not divide among 4 replicas"),
        ({"batches": ["text"]}, "a batch of 0 records does not divide"),
        ({"batches": []}, "the training data gave no full batch"),
        ({"make": lambda: nn.Linear(4, 2)}, "nothing to train Linear on .* set its example_input_array"),
        ({"make": lambda: 3}, "made int, not a torch.nn.Module"),
        ({"make": _lit}, "nothing to train Lit on"),
        ({"make": nn.Linear}, r"^Linear\(\) makes no module: missing a required argument: 'in_features'"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _checked(options.pop("make", Plain), options.pop("batches", None), **options)


class TestDifference:
    def test_is_relative_to_the_parameters_largest_element(self) -> None:
        alone = {"a": torch.tensor([4.0, 0.0]), "b": torch.tensor([1.0])}
        together = [alone, {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([1.5])}]
        assert compare(alone, together) == {"b": 0.5, "a": 0.25}

    def test_of_equal_zeros_is_zero(self) -> None:
        assert compare({"a": torch.zeros(2)}, [{"a": torch.zeros(2)}]) == {"a": 0.0}

    @pytest.mark.parametrize("other", [float("nan"), float("inf")])
    def test_from_nan_or_infinity_is_infinite(self, other: float) -> None:
        found = compare(
            {"a": torch.ones(1), "b": torch.ones(1)}, [{"a": torch.ones(1), "b": torch.tensor([other])}]
        )
        assert list(found.items()) == [("b", float("inf")), ("a", 0.0)]

    def test_from_zero_is_infinite(self) -> None:
        assert compare({"a": torch.zeros(1)}, [{"a": torch.ones(1)}]) == {"a": float("inf")}

    def test_is_refused_if_one_replica_diverged(self) -> None:
        with pytest.raises(UsageError, match="a is not finite after training on one replica"):
            compare({"a": torch.tensor([float("nan")])}, [])


class TestCommand:
    @pytest.mark.long
    def test_prints_one_line(self) -> None:
        done = _invoke("toy_module:Net")
        assert (done.exit_code, done.stdout.count("\n")) == (0, 1)
        assert "2 steps on 4 replicas and on one: the largest relative difference is" in done.stdout

    @pytest.mark.slow
    def test_prints_a_document_and_fails_beyond_the_tolerance(self) -> None:
        done = _invoke("--json", "--tolerance", "1e-6", "toy_module:Summed")
        assert done.exit_code == 1
        report = json.loads(done.stdout)
        assert (report["within"], report["devices"], report["tolerance"]) == (False, 4, 1e-6)
        assert report["differences"][report["worst"]] == report["difference"]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("toy_module", "'toy_module' does not name a module and an attribute"),
            ("no_such:Net", "cannot import 'no_such': No module named 'no_such'"),
            ("toy_module:Missing", "module 'toy_module' has no 'Missing'"),
            ("toy_module:number", "module 'toy_module' cannot be called: 'number'"),
        ],
    )
    def test_refuses_a_missing_module_or_attribute(self, name: str, message: str) -> None:
        done = _invoke("--json", name)
        assert done.exit_code == 2
        assert message in json.loads(done.stdout)["error"]

    def test_finds_modules_in_the_working_directory(self, tmp_path: Path) -> None:
        (tmp_path / "beside.py").write_text("import torch\nNet = torch.nn.Identity")
        assert isinstance(load_factory("beside:Net")(), nn.Identity)


def _invoke(*args: str) -> Any:
    options = ["check-replicas", "--runtime", "fake", "--steps", "2", "--batch-size", "8"]
    app = Typer()
    plugin.polyxla_add_commands(app)
    return CliRunner().invoke(app, [*options, *args])
