"""Save to a disk that gets full, in both formats; print the errors. Argument: its directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import torch

from polyxla_training.checkpoint import CheckpointError, load, save

FORMATS: tuple[Literal["safetensors", "torch"], ...] = ("safetensors", "torch")
path = sys.argv[1] + "/state"
save({"step": 1}, path)
for file_format in FORMATS:
    try:
        save({"step": 2, "big": torch.zeros(2**20)}, path, format=file_format)
    except CheckpointError as error:
        print(error)
    assert load(path) == {"step": 1}
    assert [path.name for path in Path(sys.argv[1]).iterdir()] == ["state"]
