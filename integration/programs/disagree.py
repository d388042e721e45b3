"""A plain torch_xla program whose replicas do different things in the same turn, as its argument says."""

import sys

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


def meet(kind: str, ordinal: int) -> None:
    values = torch.ones(2 + ordinal, 3, device=torch_xla.device())
    if kind == "operator":
        print(xm.all_reduce("sum" if ordinal else "max", values[:2]))
    if kind == "shape":
        xm.all_gather(values, pin_layout=False).cpu()


def train(kind: str, ordinal: int) -> None:
    device = torch_xla.device()
    torch.manual_seed(ordinal if kind == "seed" else 0)
    module = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    used = module[ordinal:] if kind == "branch" else module
    torch.stack([part(torch.ones(2, device=device)) for part in used]).sum().backward()
    xm.optimizer_step(optimizer)
    torch_xla.sync()


def main(_: int, kind: str) -> None:
    if kind in ("operator", "shape"):
        meet(kind, xr.global_ordinal())
    else:
        train(kind, xr.global_ordinal())


if __name__ == "__main__":
    torch_xla.launch(main, args=(sys.argv[1],))
