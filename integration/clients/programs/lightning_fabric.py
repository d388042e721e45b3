"""Train digits with Lightning Fabric: python lightning_fabric.py --accelerator tpu --dir runs"""

import argparse
import json
from pathlib import Path

import torch
from digits_data import GLOBAL_BATCH, datasets, network
from lightning.fabric import Fabric, seed_everything
from torch.nn import functional as F
from torch.utils.data import DataLoader


def train(fabric, args):
    seed_everything(0, verbose=False)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer = fabric.setup(model, optimizer)
    batch = GLOBAL_BATCH // fabric.world_size
    train_data, test_data = datasets()
    # Not shuffled: Fabric's loaders count their epochs, and begin again with 0 in a resumed run.
    loader = fabric.setup_dataloaders(DataLoader(train_data, batch))
    test_loader = fabric.setup_dataloaders(DataLoader(test_data, batch))
    state = {"model": model, "optimizer": optimizer, "epochs": 0, "steps": 0}
    if args.resume:
        fabric.load(args.resume, state)
    first = state["steps"]

    for epoch in range(state["epochs"], args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            state["steps"] += 1
        state["epochs"] += 1
        fabric.save(Path(args.dir, f"epoch={epoch}.ckpt"), state)

    right = [(model(images).argmax(dim=1) == labels).float().mean() for images, labels in test_loader]
    accuracy = fabric.all_reduce(torch.stack(right).mean(), reduce_op="mean")
    if fabric.is_global_zero:
        result = {
            "world_size": fabric.world_size,
            "device": fabric.device.type,
            "first_step": first,
            "steps": state["steps"],
            "accuracy": accuracy.item(),
            "weight": model.get_parameter("2.weight").norm().item(),
        }
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    fabric = Fabric(accelerator=args.accelerator, devices=args.devices)
    fabric.launch(train, args)
