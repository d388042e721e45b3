"""The table of layers that a Trainer prints before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyxla import UsageError
from polyxla_training import Trainer
from polyxla_training.listeners.progress import MOST_LAYERS, print_layers


class _Net(torch.nn.Module):
    """Two linear layers, one in a block, whose weights are tied, and a frozen one."""

    def __init__(self, layers: int = 0) -> None:
        super().__init__()
        tied = torch.nn.Linear(4, 4)
        self.block = torch.nn.Sequential(tied, torch.nn.ReLU())
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.head.weight = tied.weight
        self.frozen = torch.nn.Linear(1000, 1, bias=False).requires_grad_(requires_grad=False)
        self.more = torch.nn.ModuleList(torch.nn.Identity() for _ in range(layers))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.block(batch)).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


HEAD = ["layer", "type", "parameters", "trainable", "size"]
BLOCK = ["block", "Sequential", "20", "20", "80", "bytes"]
REST = [
    ["head", "Linear", "16", "16", "64", "bytes"],
    ["frozen", "Linear", "1,000", "0", "3.9", "KiB"],
    ["more", "ModuleList", "0", "0", "0", "bytes"],
]
ALL = ["all", "_Net", "1,020", "20", "4.0", "KiB"]
IN_BLOCK = [
    ["block.0", "Linear", "20", "20", "80", "bytes"],
    ["block.1", "ReLU", "0", "0", "0", "bytes"],
]


def _rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_small_module_has_all_layers_and_tied_parameters_count_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_layers(_Net(), summary=True)
    assert _rows(capsys.readouterr().err) == [HEAD, BLOCK, *IN_BLOCK, *REST, ALL]


def test_a_large_module_has_the_top_level_and_a_number_of_levels_is_obeyed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_layers(_Net(MOST_LAYERS), summary=True)
    assert _rows(capsys.readouterr().err) == [HEAD, BLOCK, *REST, ALL]
    print_layers(_Net(MOST_LAYERS), summary=2)
    assert len(_rows(capsys.readouterr().err)) == 1 + 4 + 2 + MOST_LAYERS + 1
    print_layers(_Net(), summary=1)
    assert _rows(capsys.readouterr().err) == [HEAD, BLOCK, *REST, ALL]


def test_a_module_without_layers_has_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_layers(torch.nn.Linear(2, 1, dtype=torch.bfloat16), summary=True)
    assert _rows(capsys.readouterr().err) == [HEAD, ["all", "Linear", "3", "3", "6", "bytes"]]


@pytest.mark.usefixtures("fake_replicas")
@pytest.mark.parametrize(
    ("options", "tables"), [({}, 1), ({"summary": False}, 0), ({"progress": False}, 0), ({"summary": 3}, 1)]
)
def test_one_replica_prints_the_table_before_training(
    options: Any, tables: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(runtime="fake", devices=4, log_dir=None, **options)
    trainer.fit(_Net(), [torch.ones(1, 4)] * 4)
    rows = _rows(capsys.readouterr().err)
    assert [rows.count(HEAD), rows.count(ALL)] == [tables, tables]
    assert not tables or rows.index(ALL) < next(at for at, row in enumerate(rows) if "epoch" in row)


def test_a_number_of_levels_is_positive() -> None:
    with pytest.raises(UsageError, match="summary=0 is not a positive integer"):
        Trainer(summary=0)
