"""Resume a training that was killed, with the same result as without the interruption.

    polyxla run -m polyxla_examples.resume --checkpoint-dir checkpoints

Kill it at any time and start it again. Parameters, optimizer, schedule, the position in the shuffled data
and the random generators are restored. ``kill -9`` loses the steps since the last checkpoint; ``kill``
loses none.
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
    """Restores vectors ``[record, 16]`` from noisy ones; each step draws the noise on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of one batch with new noise."""
        (clean,) = batch
        # The noise comes from the device's generator, which a checkpoint saves and a resumed run restores.
        loss = F.mse_loss(self.net(clean + 0.3 * torch.randn_like(clean)), clean)
        self.log("mean_loss", loss, on_epoch=True)  # type: ignore[operator]
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with a cosine schedule over all steps, including those before a restart."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        trainer: Any = self.trainer
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, int(trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@app.command()
def main(
    checkpoint_dir: Annotated[
        Path, typer.Option(help="Directory for checkpoints, to save to and resume from.")
    ],
    epochs: Annotated[int, typer.Option(help="Passes over the data, all runs together.")] = 20,
    save_every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON line.")] = False,
) -> None:
    """Train to the end, starting from the last checkpoint."""
    polyxla.seed_everything(0)
    # Seeded above, so that every run makes the same data.
    data = TensorDataset(torch.randn(2000, 4) @ torch.randn(4, 16))
    module = Denoiser()
    trainer = polyxla_training.Trainer(
        max_epochs=epochs,
        seed=0,
        log_dir=None,
        checkpoint_dir=checkpoint_dir,
        save_every_n_steps=save_every,
        # From the newest intact checkpoint in the directory, or from the beginning if there is none.
        resume="auto",
    )
    trainer.fit(module, DataLoader(data, 40, shuffle=True))
    result = {
        "steps": trainer.outcome.steps if trainer.outcome else 0,
        # The same to the last digit, however often the run was killed.
        "checksum": sum(parameter.double().sum().item() for parameter in module.parameters()),
    }
    print(json.dumps(result) if as_json else "  ".join(f"{name} {value}" for name, value in result.items()))


if __name__ == "__main__":
    app()
