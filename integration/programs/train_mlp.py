"""Train a small network in a plain torch_xla loop; the argument is the batch size."""

from __future__ import annotations

import sys

import torch
import torch_xla
import torch_xla.core.xla_model as xm


def train(index: int) -> None:
    """Train until something stops the program."""
    device = torch_xla.device()
    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        images = torch.rand(int(sys.argv[1]), 64, device=device)
        optimizer.zero_grad()
        model(images).square().mean().backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()


if __name__ == "__main__":
    torch_xla.launch(train)
