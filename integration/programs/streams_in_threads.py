"""Reads a stream that asks for its ordinal while it is read, in a thread and in a worker of a loader."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_backend
import torch_xla.runtime as xr
from torch.utils.data import DataLoader, IterableDataset

from polyxla import Replica, UsageError, launch


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, asks_group: bool) -> None:
        self.asks_group = asks_group

    def __iter__(self) -> Iterator[torch.Tensor]:
        mine, count = (
            (dist.get_rank(), dist.get_world_size())
            if self.asks_group
            else (xr.global_ordinal(), xr.world_size())
        )
        yield from (torch.tensor(float(number)) for number in range(8) if number % count == mine)


def read(replica: Replica) -> tuple[list[list[float]], str]:
    dist.init_process_group("xla", init_method="xla://")
    found = []
    for asks_group in (False, True):
        for workers in (0, 1):
            stream = DataLoader(Stream(asks_group), batch_size=2, num_workers=workers)
            loader = pl.MpDeviceLoader(stream, replica.device)
            found.append([value for batch in loader for value in batch.tolist()])
    try:
        with torch_xla.compile(full_graph=True):
            torch.ones(1, device=replica.device)
    except UsageError as error:
        return found, error.fix
    return found, "not refused"


if __name__ == "__main__":
    print(launch(read))
