"""Three loops of over 5 s: on the host, with torch_xla.sync(), and without it. Only the last one is reported."""

import time

import torch
import torch_xla

STEPS = 12


def train(device: torch.device, sync: bool) -> None:
    module = torch.nn.Linear(2, 1).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        module(torch.ones(4, 2, device=device)).sum().backward()
        optimizer.step()
        if sync:
            torch_xla.sync()
        time.sleep(0.5)


if __name__ == "__main__":
    train(torch.device("cpu"), sync=False)
    train(torch_xla.device(), sync=True)
    train(torch_xla.device(), sync=False)
