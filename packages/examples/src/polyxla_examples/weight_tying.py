"""Two layers share one tensor, on the device as on the host: neither the move nor the optimizer parts them.

    polyxla run -m polyxla_examples.weight_tying

On XLA a move to the device makes new tensors. torch_xla alone then trains two copies, and says nothing.
"""

from __future__ import annotations

import json
from typing import Annotated

import torch
import typer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyxla
import polyxla_training

WORDS, WIDTH = 50, 32

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class NextWord(nn.Module):
    """Guesses the next word; the table that reads words is the one that writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Embedding(WORDS, WIDTH)
        self.think = nn.Linear(WIDTH, WIDTH)
        self.write = nn.Linear(WIDTH, WORDS, bias=False)
        self.write.weight = self.read.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the scores of each word's successor, ``[record, WORDS]``."""
        scores: torch.Tensor = self.write(torch.tanh(self.think(self.read(words))))
        return scores

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss, and see that the layers still share their tensor where it is trained."""
        if self.write.weight is not self.read.weight:
            raise RuntimeError("the layers were parted on the way to the device")
        words, successors = batch
        return F.cross_entropy(self(words), successors)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam over the two tensors there are: the shared one, and the layer between."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


@app.command()
def main(
    epochs: Annotated[int, typer.Option(help="Passes over the pairs of words.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Learn a made-up language of fixed pairs, and say whether one table still serves both ends."""
    polyxla.seed_everything(0)
    words = torch.arange(WORDS).repeat(20)
    pairs = TensorDataset(words, (7 * words + 3) % WORDS)
    module = NextWord()
    trainer = polyxla_training.Trainer(max_epochs=epochs, seed=0, log_dir=None)
    trainer.fit(module, DataLoader(pairs, 100, shuffle=True))
    known = torch.arange(WORDS)
    result = {
        "tied": module.write.weight is module.read.weight,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "right": (module(known).argmax(1) == (7 * known + 3) % WORDS).float().mean().item(),
    }
    print(json.dumps(result) if as_json else "  ".join(f"{name} {value}" for name, value in result.items()))


if __name__ == "__main__":
    app()
