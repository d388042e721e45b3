"""A masked language model learns to fill in the missing bytes of your text files, in the precision you name.

    polyxla run -m polyxla_examples.language_model --text book.txt --precision bf16-mixed

Without ``--text`` it reads what Python's own help says of the language.
"""

from __future__ import annotations

import json
import math
import pydoc_data.topics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyxla
import polyxla_training

BYTES, MASK = 256, 256
"""A token is a byte; one more stands for a byte that is hidden."""
LENGTH = 64
"""Bytes in a record."""
HIDDEN_SHARE = 0.15
"""Source: BERT hides as many (Devlin et al. 2018, section 3.1)."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class MaskedModel(nn.Module):
    """A small transformer over records of bytes, int64 ``[record, LENGTH]``."""

    def __init__(self, width: int, layers: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.embed = nn.Embedding(BYTES + 1, width)
        self.place = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, BYTES)

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return each byte's scores ``[record, LENGTH, BYTES]``, those where `hidden` is true unseen."""
        seen = torch.where(hidden, MASK, tokens)
        result: torch.Tensor = self.scores(self.encoder(self.embed(seen) + self.place))
        return result

    def loss(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the hidden bytes, in nats."""
        each = F.cross_entropy(self(tokens, hidden).float().transpose(1, 2), tokens, reduction="none")
        return (each * hidden).sum() / hidden.sum()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Hide other bytes every time."""
        (tokens,) = batch
        return self.loss(tokens, torch.rand(tokens.shape, device=tokens.device) < HIDDEN_SHARE)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        """Hide every seventh byte, so that runs can be compared."""
        (tokens,) = batch
        hidden = (torch.arange(LENGTH, device=tokens.device) % 7 == 3).expand(tokens.shape)
        self.log("val_bits", self.loss(tokens, hidden) / math.log(2))  # type: ignore[operator]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def records(files: list[Path]) -> tuple[TensorDataset, TensorDataset]:
    """Return the files' bytes as records for training, and every tenth for validation."""
    text = b"".join(file.read_bytes() for file in files)
    count = len(text) // LENGTH
    if count < 10:
        raise typer.BadParameter(
            f"{len(text)} bytes are too few: {10 * LENGTH} are needed", param_hint="--text"
        )
    blocks = torch.tensor(list(text[: count * LENGTH])).view(count, LENGTH)
    held_out = torch.arange(count) % 10 == 0
    return TensorDataset(blocks[~held_out]), TensorDataset(blocks[held_out])


@app.command()
def main(
    text: Annotated[list[Path] | None, typer.Option(help="A file to learn; may be repeated.")] = None,
    precision: Annotated[str | None, typer.Option(help="32-true, bf16-mixed or bf16-true.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer updates.")] = 200,
    batch_size: Annotated[int, typer.Option(help="Records per step and replica.")] = 32,
    width: Annotated[int, typer.Option(help="Of the transformer.")] = 128,
    layers: Annotated[int, typer.Option(help="Of the transformer.")] = 2,
    seed: Annotated[int, typer.Option(help="Seeds weights, order and hidden bytes.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Train, and say how many bits a hidden byte of held-out text costs."""
    polyxla.seed_everything(seed)
    train, val = records(text or [Path(pydoc_data.topics.__file__)])
    trainer = polyxla_training.Trainer(
        precision=precision, max_epochs=1000, max_steps=steps, seed=seed, log_dir=None, clip_norm=1.0
    )
    module: Any = MaskedModel(width, layers, learning_rate=2e-3)
    metrics = trainer.fit(
        module, DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(val, 128)
    )
    result = {"precision": precision, "steps": steps, "bits_per_hidden_byte": metrics["val_bits"]}
    print(json.dumps(result) if as_json else "  ".join(f"{name} {value}" for name, value in result.items()))


if __name__ == "__main__":
    app()
