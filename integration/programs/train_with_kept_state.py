"""Train with what an earlier start has kept on the worker; print each step, and at the end the weights' bits.

Arguments: the number of steps, and, if it is to be killed, the step after which it waits for that.
"""

from __future__ import annotations

import hashlib
import sys
import time

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn

from polyxla_examples.digits import datasets
from polyxla_xrt.keeping import keep, kept

BATCH, EVERY = 16, 5
WAIT_S = 300


def say(what: str) -> None:
    # One write for a line, because replicas share the pipe.
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def train(index: int, steps: int, waits_after: int | None = None) -> None:
    images, labels = datasets()[0].tensors
    torch.manual_seed(0)
    model = nn.Linear(images[0].numel(), 10).to(torch_xla.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if state := kept("training"):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        say(f"continues at {first}")
    for step in range(first, steps):
        if step % EVERY == 0:
            keep("training", {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
        torch.manual_seed(1000 * xr.global_ordinal() + step)
        chosen = torch.randint(len(images), (BATCH,))
        optimizer.zero_grad()
        loss = F.cross_entropy(
            model(images[chosen].flatten(1).to(torch_xla.device())), labels[chosen].to(torch_xla.device())
        )
        loss.backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
        say(f"step {step}")
        if step == waits_after:
            time.sleep(WAIT_S)
    weights = b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
    say(f"weights {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    torch_xla.launch(train, args=tuple(map(int, sys.argv[1:])))
