"""Two loops of over 5 s, with torch_xla.sync() and without: only line 19 of the second is reported."""

import time

import torch
import torch_xla


def train(device: torch.device, sync: bool) -> None:
    ours, host = (torch.zeros(4, device=where, requires_grad=True) for where in (device, "cpu"))
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in (ours, host)]
    for _ in range(12):
        for weight in (ours, host):
            weight.grad = weight.detach() + 1.0
        if sync:
            torch_xla.sync()
        else:
            optimizers[1].step()
        optimizers[0].step()
        time.sleep(0.5)


if __name__ == "__main__":
    train(torch_xla.device(), sync=True)
    train(torch_xla.device(), sync=False)
