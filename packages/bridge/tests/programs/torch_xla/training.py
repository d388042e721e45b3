"""Ten steps of a small convnet, on the device and with torch alone."""

import copy

import torch
import torch_xla
import torch_xla.debug.metrics as met


def train(model: torch.nn.Module, data: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data), labels).backward()
        optimizer.step()
        torch_xla.sync()


torch.manual_seed(0)
layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3)]
here = torch.nn.Sequential(*layers)
there = copy.deepcopy(here).to(torch_xla.device())
data, labels = torch.randn(16, 1, 8, 8), torch.randint(3, (16,))
train(here, data, labels)
train(there, data.to(torch_xla.device()), labels.to(torch_xla.device()))
pairs = zip(here.parameters(), there.parameters(), strict=True)
worst = max((a - b.cpu()).abs().max().item() for a, b in pairs)
compiles = met.metric_data("CompileTime")[0]
print(worst < 1e-4, compiles <= 4)
