"""Train on every core; print each step, and at the end the bits of each replica's losses and weights.

Arguments: ``digits`` or ``decoder``, which has dropout; the number of steps; the seconds after each.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn
from train_on_slices import BATCH, LENGTH, WIDTH, WORDS, Batch, Block

from polyxla_examples.digits import DigitsNet, datasets

IMAGES, _ = datasets()


def batch(what: str, step: int) -> Batch:
    """Return the inputs and the targets of this replica's step."""
    torch.manual_seed(1000 * xr.global_ordinal() + step)
    if what == "decoder":
        tokens = torch.randint(WORDS, (BATCH, LENGTH + 1))
        return tokens[:, :-1], tokens[:, 1:]
    images, labels = IMAGES.tensors
    chosen = torch.randint(len(images), (BATCH,))
    return images[chosen], labels[chosen]


def train(index: int, what: str, steps: int, pause_s: float) -> None:
    torch.manual_seed(0)
    decoder = nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        Block(),
        nn.Dropout(0.2),
        Block(),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, WORDS),
    )
    model = (decoder if what == "decoder" else DigitsNet(1e-2)).to(torch_xla.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    xm.set_rng_state(7 + xr.global_ordinal())
    losses: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = (part.to(torch_xla.device()) for part in batch(what, step))
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
        # Most steps are not waited for, so that many executions are under way when the worker is lost.
        losses.append(loss.detach() if step % 5 else float(loss.item()).hex())
        if xr.global_ordinal() == 0:
            print("step", step, flush=True)
        time.sleep(pause_s)
    found = [value if isinstance(value, str) else float(value.item()).hex() for value in losses]
    weights = b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
    text = json.dumps({"losses": found, "weights": hashlib.sha256(weights).hexdigest()})
    sys.stdout.write(f"ordinal {xr.global_ordinal()} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch_xla.launch(train, args=(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
