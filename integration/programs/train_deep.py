"""Train equal layers until something stops the script; arguments: batch size and number of layers."""

from __future__ import annotations

import sys

import torch

import polyxla


def train(replica: polyxla.Replica, batch_size: int, layers: int) -> None:
    """Train."""
    model = replica.setup(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers))))
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        images = torch.rand(batch_size, 64, device=replica.device)
        optimizer.zero_grad()
        model(images).square().mean().backward()
        replica.step(optimizer)


if __name__ == "__main__":
    polyxla.launch(train, args=(int(sys.argv[1]), int(sys.argv[2])))
