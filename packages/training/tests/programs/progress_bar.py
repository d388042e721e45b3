"""Show the progress of four steps. Arguments: the steps per epoch, or none if they are unknown.

With known steps two groups of parameters have learning rates; with unknown ones the rate is a tensor.
"""

from __future__ import annotations

import sys

import torch

from polyxla_training.listeners.progress import ProgressListener
from polyxla_training.observe.step_counters import LoggedValues

steps_per_epoch = int(sys.argv[1]) if len(sys.argv) > 1 else None
first, second = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
groups = [{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.01}]
optimizer = torch.optim.SGD(groups) if steps_per_epoch else torch.optim.SGD([first], torch.tensor(0.1))
progress = ProgressListener(2, steps_per_epoch, LoggedValues(every_n_steps=1), optimizer)
for step in range(1, 5):
    progress.polyxla_step_finished(step=step, logged={"loss": 1 / step})
progress.polyxla_metrics_ready(step=4, metrics={"val_loss": 0.5, "loss[test]": 0.5})
progress.polyxla_replica_stopped()
