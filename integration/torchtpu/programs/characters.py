"""A model of characters that learns a text, on one device: characters.py [DEVICE]."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "tpu"
TEXT = """Now is the time for all good men to come to the aid of the party.
The quick brown fox jumps over the lazy dog.
Pack my box with five dozen liquor jugs.
"""
CONTEXT, STEPS = 8, 20


def main():
    letters = sorted(set(TEXT))
    codes = torch.tensor([letters.index(letter) for letter in TEXT])
    windows = codes.unfold(0, CONTEXT + 1, 1).to(DEVICE)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(len(letters), 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, 64),
        nn.Tanh(),
        nn.LayerNorm(64),
        nn.Linear(64, len(letters)),
    ).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(windows[:, :-1]), windows[:, -1])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        print("loss", loss.item(), flush=True)


if __name__ == "__main__":
    main()
