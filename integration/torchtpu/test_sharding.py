"""Modules whose parameters are divided among replicas train as those that every replica has whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyxla
import polyxla_training
from polyxla import DisagreementError, Replica, UsageError
from polyxla_testing import RuntimeUnderTest

WORDS, WIDTH, REPLICAS = 32, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """A model of words with tied embeddings, which belong to no block."""

    tp_plan: ClassVar = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out

    def training_step(self, batch: Any) -> torch.Tensor:
        words = batch[0]
        return F.cross_entropy(self(words[:, :-1].contiguous()).flatten(0, 1), words[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)


def made_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def sentences() -> TensorDataset:
    return TensorDataset(torch.randint(0, WORDS, (64, 8), generator=torch.Generator().manual_seed(1)))


def losses(replica: Replica, mesh: Mapping[str, int] | None) -> list[float]:
    module = made_model(replica.ordinal)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)
    replica.setup(module, optimizer, mesh=mesh)
    found = []
    # Replicas that share records take batches that are larger by as much.
    batch = 32 // replica.data_world.world_size
    for records in replica.loader(DataLoader(sentences(), batch)):
        optimizer.zero_grad()
        loss = module.training_step(records)
        loss.backward()
        replica.step(optimizer, clip_norm=0.5)
        found.append(replica.all_reduce(loss.detach(), "mean").item())
    return found


@pytest.fixture(scope="module")
def reference() -> list[float]:
    found: list[float] = polyxla.launch(losses, (None,), devices=REPLICAS, runtime="torchtpu")[0]
    return found


@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 4},
        {"zero1": 4},
        {"ddp": 2, "fsdp": 2},
        {"fsdp": 2, "tp-plan": 2},
        {"ddp": -1, "tp-plan": 2},
        {"tp-plan": 4},
    ],
    ids="-".join,
)
def test_a_divided_module_trains_as_a_whole_one(mesh: dict[str, int], reference: list[float]) -> None:
    found = polyxla.launch(losses, (mesh,), devices=REPLICAS, runtime="torchtpu")
    assert len(reference) == 2
    for trained in found:
        assert trained == pytest.approx(reference, rel=1e-5)


class Branching(nn.Module):
    """One of two parts computes."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, ordinal: int) -> torch.Tensor:
        out: torch.Tensor = (self.odd if ordinal % 2 else self.even)(x)
        return out


class Branches(nn.Module):
    """Within a layer, or as layers of their own, replicas use different parameters."""

    def __init__(self, are_layers: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.layers = nn.ModuleList(parts if are_layers else [Branching()])

    def forward(self, x: torch.Tensor, ordinal: int) -> torch.Tensor:
        are_layers = len(self.layers) > 1
        out: torch.Tensor = self.layers[ordinal % 2](x) if are_layers else self.layers[0](x, ordinal)
        return out.square().mean()


def given(ordinal: int, batch: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * ordinal + batch))


def branched_losses(
    replica: Replica, mesh: Mapping[str, int] | None, are_layers: bool = False
) -> list[float]:
    module = Branches(are_layers)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    replica.setup(module, optimizer, mesh=mesh)
    found = []
    for _ in range(3):
        for batch in range(2):
            loss = module(replica.to_device(given(replica.ordinal, batch)), replica.ordinal)
            (loss / 2).backward()
        replica.step(optimizer, clip_norm=0.2)
        optimizer.zero_grad()
        found.append(replica.all_reduce(loss.detach(), "mean").item())
    return found


def branched_losses_of_one_process() -> list[float]:
    module = Branches(are_layers=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    found = []
    for _ in range(3):
        for batch in range(2):
            losses = [module(given(ordinal, batch), ordinal) for ordinal in range(REPLICAS)]
            loss = torch.stack(losses).mean()
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(None, marks=pytest.mark.long),
        {"fsdp": 4},
        {"zero1": 4},
        pytest.param({"ddp": 2, "fsdp": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_replicas_that_use_other_parts_of_a_layer_train_as_one_process(
    mesh: dict[str, int] | None,
) -> None:
    for trained in polyxla.launch(branched_losses, (mesh,), devices=REPLICAS, runtime="torchtpu"):
        assert trained == pytest.approx(branched_losses_of_one_process(), rel=1e-5)


def test_replicas_that_use_different_layers_are_named() -> None:
    text = r"layer 1 of this step is layers\.0 in replica 0, and layers\.1 in replica 1\. The mesh divides"
    with pytest.raises(DisagreementError, match=text):
        polyxla.launch(branched_losses, ({"fsdp": 2}, True), devices=2, runtime="torchtpu")


def fit(strategy: Any, module: Model, **options: Any) -> polyxla_training.Trainer:
    chosen = {"devices": REPLICAS, "max_epochs": 2, "seed": 0, "log_dir": None, "progress": False, **options}
    trainer = polyxla_training.Trainer(strategy=strategy, runtime="torchtpu", **chosen)
    trainer.fit(module, DataLoader(sentences(), 4))
    return trainer


def test_a_trainer_divides_the_module_and_returns_it_whole(tmp_path: Path) -> None:
    whole, divided, resumed = made_model(), made_model(), made_model(1)
    fit("auto", whole, max_epochs=3)
    fit("fsdp", divided, checkpoint_dir=tmp_path)
    fit({"fsdp": 2, "ddp": 2}, resumed, resume=str(newest(tmp_path)), max_epochs=3)
    saved = polyxla_training.load(newest(tmp_path))["module"]
    assert all(torch.equal(value, saved[name]) for name, value in divided.state_dict().items())
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def newest(directory: Path) -> Path:
    return max(directory.glob("step-*"))


def test_one_replica_resumes_what_four_have_saved(tmp_path: Path) -> None:
    fit("fsdp", made_model(), checkpoint_dir=tmp_path, max_epochs=1)
    module = made_model(1)
    trainer = fit("auto", module, resume=str(newest(tmp_path)), max_epochs=1, devices=1)
    assert trainer.outcome is not None
    assert trainer.outcome.steps == 4
    saved = polyxla_training.load(newest(tmp_path))["module"]
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())


def test_a_module_on_the_meta_device_is_initialised_in_shards() -> None:
    with torch.device("meta"):
        module = Model()
    fit("fsdp", module)
    assert not any(tensor.is_meta for tensor in module.state_dict().values())
    layer: Any = module.layers[0]
    up = layer.up.weight.detach()
    # The first values are uniform between -1/4 and 1/4, and differ in each shard.
    assert 0.1 < up.std() < 0.2
    quarters = up.chunk(REPLICAS)
    assert not any(torch.allclose(quarters[0], other, atol=1e-2) for other in quarters[1:])


class Wide(nn.Module):
    """A model of 16 MiB, whose gradients and AdamW's state need three times as much again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256)) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def training_step(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self(batch[0]), batch[0].flip(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_a_model_larger_than_a_device_trains_in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    options: Any = {"devices": REPLICAS, "max_epochs": 4, "seed": 0, "log_dir": None, "progress": False}

    def train(strategy: Any) -> Any:
        torch.manual_seed(0)
        module: Any = Wide()
        trainer = polyxla_training.Trainer(strategy=strategy, runtime="torchtpu", **options)
        trainer.fit(module, DataLoader(TensorDataset(vectors), 4))
        return module.training_step([vectors]).item()

    monkeypatch.setenv("POLYXLA_DEVICE_MEMORY", "32MiB")
    # Of one program, or with the arrays of others.
    error = r"program \S+ needs [\d,]+ bytes .* device('s| has) 33,554,432 bytes"
    with pytest.raises(RuntimeError, match=error):
        train("auto")
    # It begins at 2.
    assert train("fsdp") < 1.2


class Evaluated(Model):
    """Its steps compute with gathered parameters, and do not take a mask."""

    log: Any

    def validation_step(self, batch: Any) -> None:
        self(batch[0])
        self.log("first", batch[0][:, 0].float())

    def predict_step(self, batch: Any) -> torch.Tensor:
        self(batch[0])
        return batch[0][:, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("records", [1, 9, 17])
def test_a_divided_module_evaluates_any_number_of_records(records: int) -> None:
    words = sentences().tensors[0][:records]
    loader = DataLoader(TensorDataset(words), 4)
    options: Any = {"devices": 2, "log_dir": None, "progress": False}
    trainer = polyxla_training.Trainer(strategy="fsdp", runtime="torchtpu", **options)
    found = trainer.validate(Evaluated(), loader)
    assert found == {"first": pytest.approx(words[:, 0].float().mean().item())}
    assert torch.cat(trainer.predict(Evaluated(), loader)).tolist() == words[:, 0].tolist()


def set_up(replica: Replica, mesh: dict[str, int]) -> None:
    replica.setup(made_model(), mesh=mesh)


def test_a_mesh_of_another_number_of_replicas_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a mesh \{'fsdp': 3\} is not one of 2 replicas"):
        polyxla.launch(set_up, ({"fsdp": 3},), devices=2, runtime="torchtpu")


@pytest.mark.long
def test_a_language_model_learns_in_shards_as_on_one_replica(
    runtime: RuntimeUnderTest, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("0123456789" * 4000)
    size = ["--text", str(text), "--steps", "120", "--width", "32", "--layers", "1", "--json"]

    def bits(devices: int, strategy: str) -> float:
        batch = ["--batch-size", str(32 // devices), "--strategy", strategy]
        program = ["-m", "polyxla_examples.language_model", *batch, *size]
        done = runtime.run("--devices", str(devices), *program)
        assert done.returncode == 0, done.stderr
        return float(json.loads(done.stdout.splitlines()[-1])["bits_per_hidden_byte"])

    alone, in_shards = bits(1, "auto"), bits(REPLICAS, "fsdp")
    # Guessing one of ten digits at random costs 3.32 bits.
    assert in_shards < 3.0
    # The replicas draw other masks than one alone.
    assert in_shards == pytest.approx(alone, abs=0.2)
