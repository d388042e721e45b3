"""Train a small classifier with Accelerate: accelerate_loop.py DIR [cpu] [resume], by torchrun or `polyxla run --each`.

It trains twenty steps of two gradients each and saves its state after ten, or, with `resume`, loads that and trains
the other ten. Losses and the accuracy on the test data are printed.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DIRECTORY = Path(sys.argv[1])
EXAMPLES, FEATURES, CLASSES, BATCH, ACCUMULATED, STEPS = 323, 24, 5, 4, 2, 20


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, 32)
        self.mix = nn.Linear(32, 32)
        # The same weight twice, which a move to another device must not make two of.
        self.again = nn.Linear(32, 32)
        self.again.weight = self.mix.weight
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.mix(torch.tanh(self.embed(x))))
        return self.head(torch.tanh(self.again(x)))


class Progress:
    """What a checkpoint keeps beside the model and the optimizer."""

    steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def data(seed, count):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    centers = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(centers[labels] + 0.7 * torch.randn(count, FEATURES, generator=generator), labels)


def main():
    accelerator = Accelerator(
        cpu="cpu" in sys.argv,
        gradient_accumulation_steps=ACCUMULATED,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(1)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
    model, optimizer, scheduler, loader, test_loader = accelerator.prepare(
        model,
        optimizer,
        scheduler,
        DataLoader(data(1, EXAMPLES), BATCH, shuffle=True),
        DataLoader(data(2, 75), BATCH),
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if "resume" in sys.argv:
        accelerator.load_state(str(DIRECTORY))
    done = progress.steps
    loader.set_epoch(done * ACCUMULATED // len(loader))
    batches = accelerator.skip_first_batches(loader, done * ACCUMULATED % len(loader))
    while progress.steps < STEPS:
        total = 0.0
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += accelerator.reduce(loss.detach(), "mean").item() / ACCUMULATED
            if not accelerator.sync_gradients:
                continue
            progress.steps += 1
            accelerator.print("loss", total, flush=True)
            total = 0.0
            if progress.steps == STEPS // 2 and not done:
                accelerator.save_state(str(DIRECTORY))
            if progress.steps == STEPS:
                break
        loader.set_epoch(progress.steps * ACCUMULATED // len(loader))
        batches = loader
    model.eval()
    right = []
    for x, y in test_loader:
        with torch.no_grad():
            found = model(x).argmax(dim=1)
        # 75 examples in batches of 16: what evens the last one is left out again.
        found, y = accelerator.gather_for_metrics((found, y))
        right.append((found == y).float().cpu())
    right = torch.cat(right)
    accelerator.print("tested", len(right), accelerator.device.type, accelerator.num_processes)
    accelerator.print("loss", 1 - right.mean().item())
    accelerator.end_training()


if __name__ == "__main__":
    main()
