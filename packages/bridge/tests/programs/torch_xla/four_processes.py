"""Trains data-parallel; prints the engine's compiles, torch_xla's, and a sum of weights."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla_helpers import engine, everywhere


def train() -> tuple[int, int, float]:
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
    model = torch.nn.Sequential(*layers).to(torch_xla.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch_xla.sync()
    data = torch.ones(4, 8) * (xr.global_ordinal() + 2)
    for _ in range(5):
        optimizer.zero_grad()
        model(data.to(torch_xla.device())).square().sum().backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
    weight = next(model.parameters()).detach().cpu().sum().item()
    return engine().compiles, met.metric_data("CompileTime")[0], round(weight, 5)


print(*everywhere(train)[0])
