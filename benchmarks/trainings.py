"""The trainings of the benchmarks: networks, and replicas that run steps on request."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from harness import HOST

BATCH = 128
POOL = 4
"""Number of host batches that a contestant cycles through."""
CLASSES = 10
WORDS, TOKENS, WIDTH = 1000, 64, 128


def convnet() -> Any:
    import torch
    from torch import nn

    class MNIST(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(1, 10, kernel_size=5), nn.BatchNorm2d(10)
            self.conv2, self.bn2 = nn.Conv2d(10, 20, kernel_size=5), nn.BatchNorm2d(20)
            self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, CLASSES)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            f = nn.functional
            hidden = self.bn1(f.relu(f.max_pool2d(self.conv1(images), 2)))
            hidden = self.bn2(f.relu(f.max_pool2d(self.conv2(hidden), 2)))
            hidden = f.relu(self.fc1(torch.flatten(hidden, 1)))
            return f.log_softmax(self.fc2(hidden), dim=1)

    return MNIST()


def images(batch: int) -> list[Any]:
    import torch

    return [
        (torch.randn(batch, 1, 28, 28), torch.randint(CLASSES, (batch,), dtype=torch.int64))
        for _ in range(POOL)
    ]


def block() -> Any:
    """Return a pre-norm transformer block; its activations are written out, for the compiler to fuse."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            rows, tokens, _ = words.shape
            parts = self.qkv(self.norm1(words)).view(rows, tokens, 3, 4, WIDTH // 4)
            q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
            weights = torch.softmax(q @ k.transpose(-1, -2) / (WIDTH // 4) ** 0.5, dim=-1)
            mixed = (weights @ v).transpose(1, 2).reshape(rows, tokens, WIDTH)
            words = words + self.out(mixed)
            hidden = self.up(self.norm2(words))
            hidden = 0.5 * hidden * (1 + torch.tanh(0.79788456 * (hidden + 0.044715 * hidden**3)))
            words = words + self.down(hidden)
            return torch.log_softmax(self.head(words.mean(1)), dim=1)

    return Block()


def sentences(batch: int) -> list[Any]:
    import torch

    return [
        (torch.randn(batch, TOKENS, WIDTH), torch.randint(CLASSES, (batch,), dtype=torch.int64))
        for _ in range(POOL)
    ]


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], list[Any]]]] = {
    "convnet": (convnet, images),
    "block": (block, sentences),
}


class Training:
    """One replica's training.

    Args:
        name: one of `MODELS`.
        batch: samples of this replica in each step.
    """

    def __init__(self, name: str, batch: int, device: Any, wrap: Callable[[Any], Any] | None = None) -> None:
        import torch

        torch.manual_seed(0)
        self.device = device
        self.batches = MODELS[name][1](batch)
        model = MODELS[name][0]().train().to(device)
        self.model = wrap(model) if wrap else model
        self.loss = torch.nn.NLLLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        self.steps = 0

    def backward(self) -> Any:
        """Run one forward and one backward pass; return the loss."""
        inputs, target = self.batches[self.steps % POOL]
        self.steps += 1
        self.optimizer.zero_grad()
        loss = self.loss(self.model(self.upload(inputs)), self.upload(target))
        loss.backward()
        return loss

    def upload(self, tensor: Any) -> Any:
        """Copy a tensor of a batch to the device."""
        return tensor.to(self.device)


class XlaTraining(Training):
    """Trains through torch_xla.

    Args:
        model: one of `MODELS`.
        batch: samples of this replica in each step.
        read_every: number of steps between two reads of the loss; 0 for none.
    """

    def __init__(self, model: str, batch: int, read_every: int = 0) -> None:
        import torch_xla

        super().__init__(model, batch, torch_xla.device())
        # Replicas that are threads have one generator of random numbers, which they seed at the same time.
        torch_xla.core.xla_model.broadcast_master_param(self.model)
        self.read_every = read_every

    def run(self, steps: int) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm

        for _ in range(steps):
            loss = self.backward()
            xm.optimizer_step(self.optimizer)
            torch_xla.sync()
            if self.read_every and self.steps % self.read_every == 0:
                loss.item()
        xm.wait_device_ops()


class SpmdTraining(XlaTraining):
    """Trains on all devices of this process by one partitioned program, each with a part of the batch.

    Args:
        model: one of `MODELS`.
        batch: samples of all devices in each step.
    """

    def __init__(self, model: str, batch: int) -> None:
        import numpy as np
        import torch_xla.runtime as xr
        from torch_xla.distributed import spmd

        xr.use_spmd()
        devices = xr.global_runtime_device_count()
        self.mesh = spmd.Mesh(np.arange(devices), (devices,), ("data",))
        super().__init__(model, batch)

    def upload(self, tensor: Any) -> Any:
        from torch_xla.distributed.spmd.xla_sharding import mark_sharding

        uploaded = tensor.to(self.device)
        mark_sharding(uploaded, self.mesh, ("data", *[None] * (tensor.dim() - 1)))
        return uploaded


class TorchTraining(Training):
    """Trains on the CPU by torch alone, or on another device that torch computes on by itself.

    Args:
        model: one of `MODELS`.
        batch: samples of this replica in each step.
        device: torch's name of the device.
        is_compiled: whether `torch.compile` compiles the model, and the update of its parameters.
        wrap: turns the model into the one that is trained.
    """

    def __init__(
        self,
        model: str,
        batch: int,
        device: str = "cpu",
        *,
        is_compiled: bool = False,
        wrap: Callable[[Any], Any] | None = None,
    ) -> None:
        import torch

        super().__init__(model, batch, torch.device(device), wrap)
        self._update: Callable[[], Any] = self.optimizer.step
        if is_compiled:
            self.model = torch.compile(self.model)
            self._update = torch.compile(self.optimizer.step)

    def run(self, steps: int) -> None:
        import torch

        for _ in range(steps):
            self.backward()
            self._update()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


class DdpTraining(TorchTraining):
    def __init__(self, model: str, batch: int, device: str = "cpu") -> None:
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(model, batch, device, wrap=DistributedDataParallel)


class JaxTraining:
    """Trains the block with JAX, as one program on all devices, each with a part of the batch.

    Args:
        platform: JAX's name of the devices.
        batch: samples of all devices in each step.
    """

    def __init__(self, platform: str, batch: int) -> None:
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        jax.config.update("jax_platforms", platform)  # type: ignore[no-untyped-call]
        mesh = jax.make_mesh((len(jax.devices()),), ("data",))
        divide: Any = PartitionSpec
        everywhere, divided = (NamedSharding(mesh, divide(*axes)) for axes in ((), ("data",)))
        keys = iter(jax.random.split(jax.random.key(0), 2 * POOL + 8))
        shapes = {
            "qkv": (WIDTH, 3 * WIDTH),
            "out": (WIDTH, WIDTH),
            "up": (WIDTH, 4 * WIDTH),
            "down": (4 * WIDTH, WIDTH),
            "head": (WIDTH, CLASSES),
        }
        weights = {name: 0.02 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
        self._weights = jax.device_put(weights, everywhere)
        self._batches = [
            jax.device_put(
                (
                    jax.random.normal(next(keys), (batch, TOKENS, WIDTH)),
                    jax.random.randint(next(keys), (batch,), 0, CLASSES),
                ),
                divided,
            )
            for _ in range(POOL)
        ]
        self._step = jax.jit(jax_step, donate_argnums=0)

    def run(self, steps: int) -> None:
        import jax

        for number in range(steps):
            self._weights = self._step(self._weights, *self._batches[number % POOL])
        jax.tree.leaves(self._weights)[0].block_until_ready()


def jax_step(weights: dict[str, Any], words: Any, target: Any) -> dict[str, Any]:
    """Return the weights after a step of SGD."""
    import jax

    gradients = jax.grad(jax_loss)(weights, words, target)
    updated: dict[str, Any] = jax.tree.map(lambda weight, slope: weight - 0.01 * slope, weights, gradients)
    return updated


def jax_loss(weights: dict[str, Any], words: Any, target: Any) -> Any:
    """Return the loss of the block, which is that of `block` without biases."""
    import jax
    import jax.numpy as jnp

    rows, tokens, _ = words.shape
    q, k, v = jnp.moveaxis((_norm(words) @ weights["qkv"]).reshape(rows, tokens, 3, 4, WIDTH // 4), 2, 0)
    scores = jax.nn.softmax(jnp.einsum("rthw,rshw->rhts", q, k) / (WIDTH // 4) ** 0.5)
    words += jnp.einsum("rhts,rshw->rthw", scores, v).reshape(rows, tokens, WIDTH) @ weights["out"]
    words += jax.nn.gelu(_norm(words) @ weights["up"]) @ weights["down"]
    chances = jax.nn.log_softmax(words.mean(1) @ weights["head"])
    return -jnp.take_along_axis(chances, target[:, None], 1).mean()


def _norm(words: Any) -> Any:
    import jax.numpy as jnp

    return (words - words.mean(-1, keepdims=True)) / jnp.sqrt(words.var(-1, keepdims=True) + 1e-5)


class XlaSum:
    """Sums arrays of zeros over all replicas, in place.

    Args:
        count: length of the array.
    """

    def __init__(self, count: int) -> None:
        import torch
        import torch_xla

        self._array = torch.zeros(count, device=torch_xla.device())

    def run(self, steps: int) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm

        for _ in range(steps):
            xm.all_reduce(xm.REDUCE_SUM, [self._array])
            torch_xla.sync()
        xm.wait_device_ops()


class TorchSum:
    """Does the same through torch.distributed.

    Args:
        count: length of the array.
    """

    def __init__(self, count: int) -> None:
        import torch

        self._array = torch.zeros(count)

    def run(self, steps: int) -> None:
        from torch import distributed

        for _ in range(steps):
            distributed.all_reduce(self._array)


def serve(training: XlaTraining | TorchTraining | JaxTraining | XlaSum | TorchSum, port: int) -> None:
    with Connection(socket.create_connection((HOST, port)).detach()) as pipe:
        while (steps := _received(pipe)) is not None:
            started, used_s = time.perf_counter(), time.process_time()
            training.run(steps)
            pipe.send((os.getpid(), time.perf_counter() - started, time.process_time() - used_s))


def _received(pipe: Connection) -> int | None:
    try:
        steps: int | None = pipe.recv()
    except EOFError:
        return None
    return steps
