"""Trains for some seconds on FAULTS_DEVICES, writes what it has trained, and prints the ordinals."""

from __future__ import annotations

import json
import os
import tempfile
import time

import torch

import polyxla

STEPS = 40
PAUSE_S = 0.1


def train(replica: polyxla.Replica) -> int:
    """Take the steps, and save the module after every tenth."""
    module = replica.setup(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        module(torch.ones(2, 4, device=replica.device)).square().mean().backward()
        replica.step(optimizer)
        if step % 10 == 9:
            with tempfile.TemporaryFile() as file:
                torch.save({name: value.cpu() for name, value in module.state_dict().items()}, file)
        if step == 0:
            print("STEP", flush=True)
        time.sleep(PAUSE_S)
    return replica.ordinal


if __name__ == "__main__":
    print(
        "RESULT", polyxla.launch(train, devices=json.loads(os.environ.get("FAULTS_DEVICES", "2"))), flush=True
    )
