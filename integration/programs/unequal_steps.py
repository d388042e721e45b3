"""A plain torch_xla program whose last replica takes fewer steps."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


def train(_: int) -> None:
    device = torch_xla.device()
    module = torch.nn.Linear(2, 1).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(9 if xr.global_ordinal() == 0 else 3):
        optimizer.zero_grad()
        loss = module(torch.ones(2, device=device)).sum()
        loss.backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
        loss.item()


if __name__ == "__main__":
    torch_xla.launch(train)
