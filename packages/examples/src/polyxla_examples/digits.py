"""Train a small CNN on scikit-learn's handwritten digits: real data without a download.

    polyxla run -m polyxla_examples.digits

The test images are held out: the model is not trained on them, and no option is tuned on them.
"""

from __future__ import annotations

import json
import math
import time
from typing import Annotated, Any

import torch
import typer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyxla
import polyxla_training

CLASSES = 10
TEST_SHARE = 0.2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class DigitsNet(nn.Module):
    """Two convolutions and a linear layer over images ``[record, 1, 8, 8]``, float32 in 0..1."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.linear = nn.Linear(64 * 2 * 2, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of the classes, ``[record, 10]``."""
        hidden = F.max_pool2d(F.relu(self.conv1(images)), 2)
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2)
        logits: torch.Tensor = self.linear(hidden.flatten(1))
        return logits

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of one batch."""
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def test_step(self, batch: list[torch.Tensor]) -> None:
        """Log the accuracy: the share of images whose largest logit is the right digit."""
        images, labels = batch
        self.log("test_accuracy", (self(images).argmax(dim=1) == labels).float().mean())  # type: ignore[operator]

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW with a one-cycle schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01)
        # The number of replicas is known only now. With several, a step uses more images, so it can be
        # larger, and an epoch has fewer steps.
        trainer: Any = self.trainer
        peak = self.learning_rate * math.sqrt(trainer.world_size)
        steps = int(trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test records: an image ``[1, 8, 8]`` and a label each."""
    images, labels = load_digits(return_X_y=True)
    # Stratified: with few test images, a random split could leave some digits out.
    parts = train_test_split(images, labels, test_size=TEST_SHARE, stratify=labels, random_state=0)
    # The images have values from 0 to 16.
    train_x, test_x = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for part in parts[:2])
    train_y, test_y = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


@app.command()
def main(
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 15,
    batch_size: Annotated[int, typer.Option(help="Images per step and replica.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule, for one replica.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the images.")] = 0,
    log_dir: Annotated[str | None, typer.Option(help="Directory for TensorBoard files.")] = None,
    checkpoint_dir: Annotated[
        str | None, typer.Option(help="Directory for checkpoints, to save to and resume from.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON line.")] = False,
) -> None:
    """Train, test on the held-out images, and print the result."""
    started = time.perf_counter()
    polyxla.seed_everything(seed)
    train, test = datasets()
    # With drop_last every batch has the same shape, so all steps share one compiled program.
    loader = DataLoader(train, batch_size, shuffle=True, drop_last=True)
    module = DigitsNet(learning_rate)
    trainer = polyxla_training.Trainer(
        max_epochs=epochs,
        log_dir=log_dir,
        seed=seed,
        checkpoint_dir=checkpoint_dir,
        save_every_n_steps=save_every if checkpoint_dir else None,
        resume="auto" if checkpoint_dir else None,
    )
    trainer.fit(module, loader)
    # Kept before the test, whose outcome takes its place.
    fitted = trainer.outcome
    metrics = trainer.test(module, DataLoader(test, batch_size))
    assert fitted is not None
    fields = ("runtime", "device", "world_size", "epochs", "steps")
    result = {
        **{name: getattr(fitted, name) for name in fields},
        "test_accuracy": metrics["test_accuracy"],
        "seconds": round(time.perf_counter() - started, 3),
    }
    plain = "  ".join(f"{name} {value}" for name, value in result.items())
    print(json.dumps(result) if as_json else plain, flush=True)


if __name__ == "__main__":
    app()
