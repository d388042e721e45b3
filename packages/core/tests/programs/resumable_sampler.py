"""A plugin whose loader can resume. It gives five batches per epoch, numbered from 100 times the epoch."""

from collections.abc import Iterator
from typing import Any

from polyxla import hookimpl


class Resumable:
    batch_size, note = 2, "divided for the test"

    def __init__(self, seed: int, repeat: bool) -> None:
        self.seed, self.repeat, self.epoch, self.start = seed, repeat, 0, 0

    def __iter__(self) -> Iterator[Any]:
        import torch

        start, self.start = self.start, 0
        epoch, self.epoch = self.epoch, self.epoch + 1
        return iter([torch.tensor([100 * epoch + i]) for i in range(start, 5)])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self, batches: int) -> dict[str, int]:
        return {"at": batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


@hookimpl
def polyxla_shard_loader(loader: Any, world: Any, seed: int, repeat: bool) -> Resumable:
    return Resumable(seed, repeat)
