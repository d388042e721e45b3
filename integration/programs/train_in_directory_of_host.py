"""Train on the hosts of an emulated pod, with checkpoints in DIRECTORY: {host} in it is the host's number."""

from __future__ import annotations

import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset
from train_in_own_directory import Net

from polyxla_training import Trainer

if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.full((32,), 3.0)), batch_size=2)
    directory = sys.argv[1].format(host=os.environ["POLYXLA_EMULATE_HOST"])
    trainer = Trainer(max_epochs=1, checkpoint_dir=directory, resume="auto", log_dir=None, progress=False)
    trainer.fit(Net(), data)
    assert trainer.outcome is not None
    print(f"STEPS {trainer.outcome.steps}")
