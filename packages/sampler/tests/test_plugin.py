"""The plugin: every command loads it, so it must import nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, TensorDataset

import polyxla_sampler
from polyxla_sampler.plugin import polyxla_shard_loader


def test_loading_it_imports_neither_torch_nor_polyxla() -> None:
    code = "import sys; import polyxla_sampler.plugin; print(*{'torch', 'polyxla'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []


def read(ordinal: int, seed: int) -> list[int]:
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=5, shuffle=True)
    mine = polyxla_shard_loader(loader, SimpleNamespace(ordinal=ordinal, world_size=2), seed, repeat=True)
    assert mine is not None
    return [int(record) for (batch,) in mine for record in batch]


def test_a_loader_is_divided_by_ordinal_and_seed() -> None:
    assert sorted(read(0, seed=3) + read(1, seed=3)) == list(range(10))
    assert read(0, seed=3) == read(0, seed=3) != read(0, seed=4)


def test_an_object_that_is_not_a_loader_is_left_to_other_plugins() -> None:
    assert polyxla_shard_loader([1, 2], SimpleNamespace(ordinal=0, world_size=1), 0, repeat=True) is None


def test_every_public_name_can_be_imported() -> None:
    for name in polyxla_sampler.__all__:
        assert getattr(polyxla_sampler, name).__name__ == name
