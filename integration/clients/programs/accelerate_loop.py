"""Train digits with Accelerate: accelerate launch --tpu --main_training_function main accelerate_loop.py --dir runs"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, is_torch_xla_available, set_seed
from digits_data import GLOBAL_BATCH, datasets, network
from torch.nn import functional as F
from torch.utils.data import DataLoader


if is_torch_xla_available():
    import accelerate_mends  # noqa: F401


class Progress:
    """What a checkpoint keeps beside the model and the optimizer."""

    def __init__(self):
        self.epochs = self.steps = 0

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()

    # The order of an epoch follows from its number, so that a resumed run goes on in the same order.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batch = GLOBAL_BATCH // accelerator.num_processes
    train_data, test_data = datasets()
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_data, batch, shuffle=True), DataLoader(test_data, batch)
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state(args.resume)
    first = progress.steps

    for epoch in range(progress.epochs, args.epochs):
        loader.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            progress.steps += 1
        progress.epochs += 1
        # load_state cannot read a safetensors file into a module on an XLA device:
        # https://github.com/huggingface/accelerate/pull/2176 lists the tests that fail for it.
        accelerator.save_state(str(Path(args.dir, f"epoch={epoch}")), safe_serialization=False)

    model.eval()
    right = []
    for images, labels in test_loader:
        with torch.no_grad():
            found = model(images).argmax(dim=1)
        found, labels = accelerator.gather_for_metrics((found, labels))
        right.append((found == labels).float().cpu())
    if accelerator.is_main_process:
        result = {
            "world_size": accelerator.num_processes,
            "device": accelerator.device.type,
            "first_step": first,
            "steps": progress.steps,
            "accuracy": torch.cat(right).mean().item(),
            "weight": accelerator.unwrap_model(model)[2].weight.norm().item(),
        }
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
