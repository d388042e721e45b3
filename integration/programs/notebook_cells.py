"""Two cells of a notebook that launch several times, and one that trains."""

# %%
import os
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

scale = 10


def train(index: int, factor: int) -> None:
    value: Any = xm.all_reduce("sum", torch.ones((), device=torch_xla.device()) * scale * factor)
    torch_xla.sync()
    print(f"CELL {xr.global_ordinal()} {value.item():g}\n", end="", flush=True)


before = dict(os.environ)
torch_xla.launch(train, args=(1,))

# %%
import polyxla  # noqa: E402

scale = 100
torch_xla.launch(train, args=(1,))
print("LAUNCHED", polyxla.launch(lambda replica: replica.all_reduce(scale), devices=2))
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())

# %%
from polyxla_training import Trainer  # noqa: E402


class Line(torch.nn.Module):
    """A line through the origin."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


Trainer(devices=1, max_epochs=2, log_dir=None).fit(Line(), [torch.ones(2, 1)] * 20)
