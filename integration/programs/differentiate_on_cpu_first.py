"""Computes gradients on the CPU, in part before it imports torch_xla, and then on four devices at once."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch


def gradient(device: str) -> float:
    x = torch.full((), 3.0, device=device, requires_grad=True)
    (x * x).backward()
    assert x.grad is not None
    return x.grad.item()


found = [gradient("cpu")] if "before" in sys.argv else []
import torch_xla  # noqa: E402, F401

if "after" in sys.argv:
    found.append(gradient("cpu"))
with ThreadPoolExecutor(4) as threads:
    found += threads.map(gradient, [f"xla:{index}" for index in range(4)])
print(*found, gradient("cpu"))
