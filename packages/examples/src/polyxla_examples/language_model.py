"""Train a masked language model on the bytes of your text files, with the precision of your choice.

    polyxla run -m polyxla_examples.language_model --text book.txt --precision bf16-mixed

Without ``--text`` it reads the topics of Python's help. On TorchTPU, ``--strategy fsdp`` divides the model
among the replicas.
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
"""A token is a byte, or the mask."""
LENGTH = 64
"""Number of bytes in a record."""
MASKED_SHARE = 0.15
"""Share of the bytes to mask. Source: BERT (Devlin et al. 2018, section 3.1)."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class MaskedModel(nn.Module):
    """A small transformer over records of bytes, int64 ``[record, LENGTH]``."""

    def __init__(self, width: int, layers: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.embed = nn.Embedding(BYTES + 1, width)
        self.position = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.logits = nn.Linear(width, BYTES)

    def forward(self, tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """Return the logits of each byte, ``[record, LENGTH, BYTES]``; `masked` bytes are not read."""
        visible = torch.where(masked, MASK, tokens)
        result: torch.Tensor = self.logits(self.encoder(self.embed(visible) + self.position))
        return result

    def loss(self, tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the masked bytes, in nats."""
        each = F.cross_entropy(self(tokens, masked).float().transpose(1, 2), tokens, reduction="none")
        return (each * masked).sum() / masked.sum()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of one batch, with random bytes masked."""
        (tokens,) = batch
        return self.loss(tokens, torch.rand(tokens.shape, device=tokens.device) < MASKED_SHARE)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        """Log the loss in bits, with every seventh byte masked so that runs can be compared."""
        (tokens,) = batch
        masked = (torch.arange(LENGTH, device=tokens.device) % 7 == 3).expand(tokens.shape)
        self.log("val_bits", self.loss(tokens, masked) / math.log(2))  # type: ignore[operator]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def records(files: list[Path]) -> tuple[TensorDataset, TensorDataset]:
    """Return the files' bytes as records: every tenth for validation, the others for training."""
    text = b"".join(file.read_bytes() for file in files)
    count = len(text) // LENGTH
    if count < 10:
        raise typer.BadParameter(
            f"{len(text)} bytes are too few; at least {10 * LENGTH} are needed", param_hint="--text"
        )
    blocks = torch.tensor(list(text[: count * LENGTH])).view(count, LENGTH)
    held_out = torch.arange(count) % 10 == 0
    return TensorDataset(blocks[~held_out]), TensorDataset(blocks[held_out])


@app.command()
def main(
    text: Annotated[list[Path] | None, typer.Option(help="A text file to train on; can be repeated.")] = None,
    precision: Annotated[str | None, typer.Option(help="32-true, bf16-mixed or bf16-true.")] = None,
    strategy: Annotated[str, typer.Option(help="auto; on TorchTPU also fsdp, zero1 or ddp.")] = "auto",
    steps: Annotated[int, typer.Option(help="Number of optimizer updates.")] = 200,
    batch_size: Annotated[int, typer.Option(help="Records per step and replica.")] = 32,
    width: Annotated[int, typer.Option(help="Width of the transformer.")] = 128,
    layers: Annotated[int, typer.Option(help="Number of transformer layers.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the order of records and the masks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON line.")] = False,
) -> None:
    """Train, and print the bits per masked byte of held-out text."""
    polyxla.seed_everything(seed)
    train, val = records(text or [Path(pydoc_data.topics.__file__)])
    trainer = polyxla_training.Trainer(
        precision=precision,
        strategy=strategy,
        max_epochs=1000,
        max_steps=steps,
        seed=seed,
        log_dir=None,
        clip_norm=1.0,
    )
    module: Any = MaskedModel(width, layers, learning_rate=2e-3)
    metrics = trainer.fit(
        module, DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(val, 128)
    )
    result = {"precision": precision, "steps": steps, "bits_per_hidden_byte": metrics["val_bits"]}
    print(json.dumps(result) if as_json else "  ".join(f"{name} {value}" for name, value in result.items()))


if __name__ == "__main__":
    app()
