"""Train digits with Lightning's Trainer: python lightning_trainer.py --accelerator tpu --dir runs"""

import argparse
import json

import lightning as L
import torch
from digits_data import GLOBAL_BATCH, datasets, network
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        right = (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


class DigitsData(L.LightningDataModule):
    def setup(self, stage):
        self.train, self.test = datasets()
        self.batch = GLOBAL_BATCH // self.trainer.world_size

    def train_dataloader(self):
        replicas, ordinal = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(self.train, replicas, ordinal, shuffle=False)
        return DataLoader(self.train, self.batch, sampler=sampler)

    def val_dataloader(self):
        replicas, ordinal = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(self.test, replicas, ordinal, shuffle=False)
        return DataLoader(self.test, self.batch, sampler=sampler)


class Report(Callback):
    def on_train_start(self, trainer, module):
        self.first = trainer.global_step

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            result = {
                "world_size": trainer.world_size,
                "device": module.device.type,
                "first_step": self.first,
                "steps": trainer.global_step,
                "accuracy": trainer.callback_metrics["accuracy"].item(),
                "weight": module.net[2].weight.norm().item(),
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

    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(args.dir, "{epoch}", save_top_k=-1), Report()],
        # Lightning would shuffle where there are several replicas, and only there.
        use_distributed_sampler=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Digits(), DigitsData(), ckpt_path=args.resume)
