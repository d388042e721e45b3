"""Frees tensors on a thread while the main thread trains.

torch_xla makes the step's seed with a lock held. A tensor that is freed needs that lock, and is freed with
the GIL held: so making the seed must not need the GIL.
"""

import threading
import time

import torch
import torch_xla

device = torch_xla.device()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).to(device)
here = torch.ones(2, 4)


def free(tensors: list[torch.Tensor]) -> None:
    while tensors:
        tensors.pop()


end = time.monotonic() + 5
while time.monotonic() < end:
    tensors = [here.to(device) for _ in range(1000)]
    torch_xla.sync()
    thread = threading.Thread(target=free, args=[tensors])
    thread.start()
    while thread.is_alive():
        model(here.to(device)).sum().backward()
        torch_xla.sync()
print("done")
