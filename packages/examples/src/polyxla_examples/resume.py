"""Kill it whenever you like, and start it again: it goes on as if nothing had happened.

    polyxla run -m polyxla_examples.resume --checkpoint-dir checkpoints

Parameters, optimizer, schedule, the place in the shuffled data and every random number go on where they
were. ``kill -9`` costs the steps since the last checkpoint; ``kill`` costs none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyxla
import polyxla_training

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Denoiser(nn.Module):
    """Restores vectors ``[record, 16]`` from noisy ones; the noise is drawn on the device in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss on this step's noise."""
        (clean,) = batch
        loss = F.mse_loss(self.net(clean + 0.3 * torch.randn_like(clean)), clean)
        self.log("mean_loss", loss, on_epoch=True)  # type: ignore[operator]
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW under a cosine schedule over all steps, those before a restart included."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        trainer: Any = self.trainer
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, int(trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@app.command()
def main(
    checkpoint_dir: Annotated[Path, typer.Option(help="Where the state is kept between runs.")],
    epochs: Annotated[int, typer.Option(help="Passes over the data, over all runs together.")] = 20,
    save_every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Train to the end, from wherever the run before this one got to."""
    polyxla.seed_everything(0)
    data = TensorDataset(torch.randn(2000, 4) @ torch.randn(4, 16))
    module = Denoiser()
    trainer = polyxla_training.Trainer(
        max_epochs=epochs,
        seed=0,
        log_dir=None,
        checkpoint_dir=checkpoint_dir,
        save_every_n_steps=save_every,
        resume="auto",
    )
    trainer.fit(module, DataLoader(data, 40, shuffle=True))
    result = {
        "steps": trainer.outcome.steps if trainer.outcome else 0,
        # Equal to the last digit, however often the run was killed.
        "checksum": sum(parameter.double().sum().item() for parameter in module.parameters()),
    }
    print(json.dumps(result) if as_json else "  ".join(f"{name} {value}" for name, value in result.items()))


if __name__ == "__main__":
    app()
