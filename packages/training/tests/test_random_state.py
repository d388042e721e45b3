"""A replica's random numbers resume from a saved file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyxla import Replica, launch
from polyxla.replica.random_state import preserved_host_state
from polyxla_testing import PluginInstaller
from polyxla_training.checkpoint import load, save


def _draw() -> tuple[float, ...]:
    return (
        random.random(),
        torch.rand(()).item(),
        float(np.random.random()),  # noqa: NPY002
        random.gauss(0, 1),
    )


def test_numbers_resume_from_a_file(
    tmp_path: Path, install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "1")

    def resume(replica: Replica) -> Any:
        replica.seed_everything(1)
        _draw()
        save(replica.rng_state(), tmp_path / "rng.safetensors")
        device, after = replica.rng_state()["device"], _draw()
        replica.seed_everything(2)
        replica.restore_rng(load(tmp_path / "rng.safetensors"))
        return (device, after), (replica.rng_state()["device"], _draw())

    with preserved_host_state():
        [(expected, found)] = launch(resume, runtime="fake")
    assert found == expected
