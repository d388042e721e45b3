"""Iterate over a dataset that hangs at its sixth record, with WORKERS loader workers."""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import polyxla


class Hanging(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            time.sleep(1000)
        return torch.zeros(index)


def train(replica: polyxla.Replica, workers: int) -> None:
    # torch_xla copies this many batches at once, and waits for all of them.
    prefetch = {"device_prefetch_size": 1}
    for batch in replica.loader(DataLoader(Hanging(), num_workers=workers), prefetch=prefetch):
        print("batch", len(batch[0]), flush=True)


if __name__ == "__main__":
    polyxla.launch(train, (int(sys.argv[1]),))
