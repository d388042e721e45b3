"""Train a masked language model in BERT's way on your text files, and compare precisions in a table.

    polyxla run -m polyxla_examples.language_model --text book.txt --precision 32-true --precision bf16-mixed

Without ``--text`` it reads the topics of Python's help. On TorchTPU, ``--strategy fsdp`` divides the model
among the replicas.
"""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import time
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
HIDDEN_SHARE = 0.15
"""Share of the bytes to predict. Source: BERT (Devlin et al. 2018, section 3.1)."""
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Shares of these bytes that become the mask, or a random byte; the rest stays. Source: the same section."""

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

    def forward(self, visible: torch.Tensor) -> torch.Tensor:
        """Return the logits of each byte, ``[record, LENGTH, BYTES]``, for tokens ``[record, LENGTH]``."""
        result: torch.Tensor = self.logits(self.encoder(self.embed(visible) + self.position))
        return result

    def loss(self, visible: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the hidden bytes, in nats."""
        # In float32, because a softmax over 256 classes loses too much in bfloat16.
        each = F.cross_entropy(self(visible).float().transpose(1, 2), tokens, reduction="none")
        # At least 1: a batch without hidden bytes has a loss of 0 instead of NaN.
        return (each * hidden).sum() / hidden.sum().clamp(min=1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of one batch, with random bytes hidden."""
        (tokens,) = batch
        hidden = torch.rand(tokens.shape, device=tokens.device) < HIDDEN_SHARE
        return self.loss(corrupted(tokens, hidden), tokens, hidden)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        """Log the loss in bits, with every seventh byte masked so that runs can be compared."""
        (tokens,) = batch
        hidden = (torch.arange(LENGTH, device=tokens.device) % 7 == 3).expand(tokens.shape)
        loss = self.loss(torch.where(hidden, MASK, tokens), tokens, hidden)
        self.log("val_bits", loss / math.log(2))  # type: ignore[operator]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def corrupted(tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return what the model reads: of the hidden bytes most are masked, some random, some as they were."""
    # Drawn on the device, so that no step waits for numbers from the host.
    draw = torch.rand(tokens.shape, device=tokens.device)
    random = torch.randint(BYTES, tokens.shape, device=tokens.device)
    visible = torch.where(hidden & (draw < MASK_SHARE), MASK, tokens)
    return torch.where(hidden & (draw >= MASK_SHARE) & (draw < MASK_SHARE + RANDOM_SHARE), random, visible)


def records(files: list[Path]) -> tuple[TensorDataset, TensorDataset]:
    """Return the files' bytes as records: every tenth for validation, the others for training."""
    text = b"".join(file.read_bytes() for file in files)
    count = len(text) // LENGTH
    if count < 10:
        raise typer.BadParameter(
            f"{len(text)} bytes are too few; at least {10 * LENGTH} are needed", param_hint="--text"
        )
    blocks = torch.tensor(list(text[: count * LENGTH])).view(count, LENGTH)
    # Spread over the text, so that both parts have the same topics.
    held_out = torch.arange(count) % 10 == 0
    return TensorDataset(blocks[~held_out]), TensorDataset(blocks[held_out])


def show(results: list[dict[str, Any]]) -> None:
    """Print a table with a row for each training."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*(name.replace("_", " ") for name in results[0]))
    for result in results:
        cells = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in result.values())
        table.add_row(*cells)
    Console(width=110).print(table)


@app.command()
def main(
    text: Annotated[list[Path] | None, typer.Option(help="A text file to train on; can be repeated.")] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="32-true, bf16-mixed or bf16-true; repeat it to compare.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="auto; on TorchTPU also fsdp, zero1 or ddp.")] = "auto",
    steps: Annotated[int, typer.Option(help="Number of optimizer updates.")] = 200,
    batch_size: Annotated[int, typer.Option(help="Records per step and replica.")] = 32,
    width: Annotated[int, typer.Option(help="Width of the transformer; BERT large has 1024.")] = 128,
    layers: Annotated[int, typer.Option(help="Number of transformer layers; BERT large has 24.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the order of records and the masks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line for each training.")] = False,
) -> None:
    """Train with each precision; print batch, time, and perplexity of the hidden bytes of held-out text."""
    train, val = records(text or [Path(pydoc_data.topics.__file__)])
    results = []
    # None is the policy that the environment chooses.
    policies: list[str | None] = [*precision] if precision else [None]
    for policy in policies:
        polyxla.seed_everything(seed)
        trainer = polyxla_training.Trainer(
            precision=policy,
            strategy=strategy,
            max_epochs=1000,
            max_steps=steps,
            seed=seed,
            log_dir=None,
            clip_norm=1.0,
        )
        module: Any = MaskedModel(width, layers, learning_rate=2e-3)
        # A shorter last batch would be one more program to compile.
        loader = DataLoader(train, batch_size, shuffle=True, drop_last=True)
        started = time.perf_counter()
        bits = trainer.fit(module, loader, DataLoader(val, 128))["val_bits"]
        # The time includes compilations, as a user would wait for them too.
        minutes = (time.perf_counter() - started) / 60
        assert trainer.outcome is not None
        result = {
            "precision": policy,
            "device": trainer.outcome.device,
            "replicas": trainer.outcome.world_size,
            "records_per_step": batch_size * trainer.outcome.world_size,
            "steps": steps,
            "minutes": round(minutes, 3),
            "bits_per_hidden_byte": bits,
            "perplexity": 2**bits,
        }
        results.append(result)
        if as_json:
            print(json.dumps(result), flush=True)
    if not as_json:
        show(results)


if __name__ == "__main__":
    app()
