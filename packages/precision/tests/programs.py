"""Write the programs that XLA receives under each policy to the JSON file named by the argument.

It runs in a process of its own: importing torch_xla takes ten seconds and changes global state.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_xla
from torch import nn
from torch_xla import _XLAC  # type: ignore[attr-defined]
from torch_xla.utils.checkpoint import checkpoint

from polyxla_precision import BF16Mixed, BF16True, Full32
from polyxla_precision.policies import Policy

POLICIES: dict[str, Policy] = {
    "32-true": Full32(),
    "bf16-mixed": BF16Mixed(),
    "bf16-true": BF16True(),
    "bf16-mixed, kept": BF16Mixed(keep_float32=("head",)),
    "bf16-true, kept": BF16True(keep_float32=("head",)),
}


class Net(nn.Module):
    """A convolution, a product with a tensor created in forward, a norm, and a head with its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.body = nn.Linear(5 * 4 * 4, 11)
        self.state = nn.Linear(11, 11)
        self.norm = nn.LayerNorm(11)
        self.head = nn.Linear(11, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).flatten(1)
        made = torch.zeros(x.shape[0], 11, device=x.device)
        out: torch.Tensor = self.head(self.norm(self.body(x) + self.state(made)))
        return out


def recomputed(policy: Policy, device: torch.device) -> dict[str, Any]:
    """Return the program that recomputes the network for the gradients, outside of `forward_context`."""
    return compiled(policy, device, lambda net, x: checkpoint(net, x.requires_grad_()))


def compiled(
    policy: Policy, device: torch.device, call: Callable[..., torch.Tensor] = nn.Module.__call__
) -> dict[str, Any]:
    """Return the program of one step's loss and gradients, and the dtypes of its inputs and outputs."""
    with policy.module_init_context():
        net = Net()
    policy.convert_module(net).to(device)
    x, target = policy.convert_input([torch.randn(2, 3, 6, 6, dtype=torch.float64), torch.tensor([1, 2])])
    with policy.forward_context():
        loss = policy.convert_output(nn.functional.cross_entropy(call(net, x.to(device)), target.to(device)))
    loss.backward()
    gradients = {
        name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None
    }
    return {
        "hlo": _XLAC._get_xla_tensors_hlo([loss, *gradients.values()]),
        "loss": str(loss.dtype),
        "parameters": {name: str(parameter.dtype) for name, parameter in net.named_parameters()},
        "gradients": {name: str(gradient.dtype) for name, gradient in gradients.items()},
    }


def tied(device: torch.device) -> bool:
    """Return whether weights that are tied on the device stay tied after a conversion there."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    net[1].weight = net[0].weight
    BF16True().convert_module(net)
    return net[1].weight is net[0].weight and net[0].weight.dtype == torch.bfloat16


def main(path: Path) -> None:
    device = torch_xla.device()
    seen: dict[str, Any] = {name: compiled(policy, device) for name, policy in POLICIES.items()}
    seen |= {f"{name}, again": recomputed(POLICIES[name], device) for name in ("bf16-mixed", "bf16-true")}
    path.write_text(json.dumps({"policies": seen, "tied": tied(device)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
