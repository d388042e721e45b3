"""The loops that ``training.py steps`` compares, each in a separate process.

    python benchmarks/contestants/loops.py NAME PORT BLOCKS STEPS

All train the same network with the same optimizer on the same batches, on torch_xla's CPU client. They
report the start of each step to a timer; in all of them the step before has then been sent to the device.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, FEATURES, WIDTH, CLASSES = 32, 64, 128, 10
RATE = 1e-3
WARM_UP = 100
"""Steps before the first block; everything is compiled in them."""
SETTLE = 30
"""Steps at the start of each block that are not timed: they use up the batches that were prefetched while
other contestants had their turn."""
AHEAD = 64
"""Batches after the last block: more than any loader prefetches."""
REST_S = 0.2
"""Time that a loader needs to fill its prefetch buffers, in seconds."""
HOST = "127.0.0.1"
COUNTS = {
    "executions": "ExecuteTime",
    "to_device": "TransferToDeviceTime",
    "from_device": "TransferFromDeviceTime",
    "compiles": "CompileTime",
}
"""torch_xla's metrics whose samples are counted."""


@dataclass
class Turns:
    """Times blocks of steps on request.

    It connects at the first step, so that it can be sent to the process that trains.

    Args:
        port: port of the benchmark.
        blocks: number of blocks.
        steps: timed steps per block.
    """

    port: int
    blocks: int
    steps: int
    _done: int = 0
    _next: int = WARM_UP
    _started: float | None = None
    _pipe: Connection | None = None
    _before: dict[str, int] | None = None

    def step(self) -> None:
        """Record the start of a step."""
        if self._done == self._next:
            self._mark()
        self._done += 1

    def _mark(self) -> None:
        import torch_xla.core.xla_model as xm

        xm.wait_device_ops()
        now = time.perf_counter()
        if self._done == WARM_UP:
            self._pipe = Connection(socket.create_connection((HOST, self.port)).detach())
            self._rest()
        elif self._started is None:
            self._started = now
            self._next += self.steps
        else:
            assert self._pipe
            self._pipe.send((now - self._started) / self.steps)
            self._started = None
            self._rest()

    def _rest(self) -> None:
        """Wait for the next turn, until the loader has filled its prefetch buffers: counts are exact."""
        assert self._pipe
        self._pipe.recv()
        time.sleep(REST_S)
        if self._before is None:
            self._before = counts()
        if self._done < self.batches - AHEAD:
            self._next += SETTLE
            return
        steps = self._done - WARM_UP
        self._pipe.send({name: (count - self._before[name]) / steps for name, count in counts().items()})
        self._next = -1

    @property
    def batches(self) -> int:
        """Number of batches that an epoch needs."""
        return WARM_UP + self.blocks * (SETTLE + self.steps) + AHEAD


def counts() -> dict[str, int]:
    """Return how often this process did each operation of `COUNTS`."""
    from torch_xla.debug import metrics

    found = {name: metrics.metric_data(metric) for name, metric in COUNTS.items()}
    return {name: data[0] if data else 0 for name, data in found.items()}


class Network(nn.Module):
    """The network to train.

    Args:
        turns: times the steps.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turns = turns
        self.layers = layers()

    def training_step(self, batch: Any) -> torch.Tensor:
        self.turns.step()
        inputs, target = batch
        return nn.functional.cross_entropy(self.layers(inputs), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE)


class LoggedNetwork(Network):
    """Logs its loss at every step."""

    log: Callable[[str, torch.Tensor], None]

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = super().training_step(batch)
        self.log("loss", loss)
        return loss


def layers() -> nn.Module:
    hidden = [nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def data(batches: int) -> DataLoader[Any]:
    torch.manual_seed(1)
    records = batches * BATCH
    dataset = TensorDataset(torch.randn(records, FEATURES), torch.randint(CLASSES, (records,)))
    return DataLoader(dataset, batch_size=BATCH)


# The contestants.


def plain(turns: Turns, loader: Iterable[Any]) -> None:
    """The loop of torch_xla's guides; the loader sends a step to the device before the next batch."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    device = torch_xla.device()
    network = Network(turns).to(device)
    optimizer = network.configure_optimizers()
    for batch in MpDeviceLoader(loader, device):
        optimizer.zero_grad()
        loss = network.training_step(batch)
        loss.backward()
        xm.optimizer_step(optimizer)


def replica(turns: Turns, loader: Iterable[Any]) -> None:
    import polyxla

    polyxla.launch(_in_replica, (turns, loader))


def _in_replica(replica: Any, turns: Turns, loader: Iterable[Any], logs: bool = False) -> None:
    network = replica.setup(Network(turns))
    optimizer = network.configure_optimizers()
    for batch in replica.loader(loader):
        optimizer.zero_grad()
        loss = network.training_step(batch)
        loss.backward()
        replica.step(optimizer, {"loss": loss.detach()} if logs else None)


def logging_replica(turns: Turns, loader: Iterable[Any]) -> None:
    """The same, with a loss that is logged; the environment says whether polyxla watches it."""
    import polyxla

    polyxla.launch(_in_replica, (turns, loader, True))


def trainer(turns: Turns, loader: Iterable[Any]) -> None:
    _train(Network(turns), loader)


def trainer_logged(turns: Turns, loader: Iterable[Any]) -> None:
    _train(LoggedNetwork(turns), loader)


def _train(network: nn.Module, loader: Iterable[Any]) -> None:
    import polyxla_training

    polyxla_training.Trainer(progress=False, log_dir=None).fit(network, loader)


def lightning(turns: Turns, loader: Iterable[Any]) -> None:
    """Train with Lightning; its XLA strategy for one device needs a TPU, so it is patched to see one."""
    from lightning.fabric.accelerators.xla import XLAAccelerator
    from lightning.pytorch import LightningModule, Trainer

    class LightningNetwork(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network(turns)

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.network.training_step(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.network.configure_optimizers()

    answers: dict[str, Callable[[], Any]] = {"is_available": lambda: True, "auto_device_count": lambda: 1}
    for question, answer in answers.items():
        setattr(XLAAccelerator, question, staticmethod(answer))
    its = Trainer(
        accelerator="tpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    its.fit(LightningNetwork(), loader)


def accelerate(turns: Turns, loader: Iterable[Any]) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    network = Network(turns)
    network, optimizer, loader = accelerator.prepare(network, network.configure_optimizers(), loader)
    for batch in loader:
        optimizer.zero_grad()
        loss = network.training_step(batch)
        accelerator.backward(loss)
        optimizer.step()


LOOPS = {
    "plain": plain,
    "Trainer": trainer,
    "Trainer, logged": trainer_logged,
    "launch": replica,
    "own loop": logging_replica,
    "Lightning": lightning,
    "Accelerate": accelerate,
}


if __name__ == "__main__":
    port, blocks, steps = map(int, sys.argv[2:])
    its_turns = Turns(port, blocks, steps)
    LOOPS[sys.argv[1]](its_turns, data(its_turns.batches))
