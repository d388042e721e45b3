"""Train two layers that share one tensor: it stays shared on the device and in the optimizer.

    polyxla run -m polyxla_examples.weight_tying

On XLA, moving a module to the device makes new tensors; torch_xla alone then silently trains two copies.
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
    """Predicts the next word; the input embedding is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        # Tied: the same Parameter under two names.
        self.output.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits of each word's successor, ``[record, WORDS]``."""
        logits: torch.Tensor = self.output(torch.tanh(self.hidden(self.embed(words))))
        return logits

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss; check that the layers share their tensor on the device too."""
        if self.output.weight is not self.embed.weight:
            raise RuntimeError("the move to the device untied the layers")
        words, successors = batch
        return F.cross_entropy(self(words), successors)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam over the shared tensor and the layer between."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


@app.command()
def main(
    epochs: Annotated[int, typer.Option(help="Passes over the pairs of words.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON line.")] = False,
) -> None:
    """Learn which word follows each word, and print whether the layers are still tied."""
    polyxla.seed_everything(0)
    words = torch.arange(WORDS).repeat(20)
    pairs = TensorDataset(words, (7 * words + 3) % WORDS)
    module = NextWord()
    trainer = polyxla_training.Trainer(max_epochs=epochs, seed=0, log_dir=None)
    trainer.fit(module, DataLoader(pairs, 100, shuffle=True))
    # After fit, the module is on the host and holds the trained parameters.
    known = torch.arange(WORDS)
    result = {
        "tied": module.output.weight is module.embed.weight,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "right": (module(known).argmax(1) == (7 * known + 3) % WORDS).float().mean().item(),
    }
    print(json.dumps(result) if as_json else "  ".join(f"{name} {value}" for name, value in result.items()))


if __name__ == "__main__":
    app()
