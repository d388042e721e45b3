"""The two runs that `polyxla_training.check_replicas` compares. Heavy: imported when that is called."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader

from polyxla import Replica, UsageError
from polyxla.plugin import map_tensors, move_module
from polyxla_training.lightning.callbacks import LightningCallbacks
from polyxla_training.lightning.data import resolve_loader
from polyxla_training.lightning.schedulers import configure_optimizers
from polyxla_training.lightning.trainer_view import TrainerView
from polyxla_training.metrics import MetricAccumulator
from polyxla_training.module_adapter import ModuleAdapter
from polyxla_training.options import FitOptions
from polyxla_training.progress import Progress

SEED = 0
"""Seed of the weights and of random batches."""


@dataclass(frozen=True)
class Workload:
    """The module and the batches that both runs train on, on the host.

    Attributes:
        module: with its initial weights, in float32.
        batches: one for each step, undivided.
        warnings: parts of the module that make the runs differ by design.
    """

    module: nn.Module
    batches: Sequence[Any]
    warnings: tuple[str, ...]


def prepare(
    make_module: Callable[[], nn.Module],
    batches: Iterable[Any] | None,
    steps: int,
    devices: int,
    batch_size: int,
) -> Workload:
    """Make the module and the batches once, so that all replicas start from the same.

    Raises:
        UsageError: there is no module, nothing to train on, or a batch that cannot be divided.
    """
    with torch.random.fork_rng(devices=[]):
        # The module is made on the CPU. torch.manual_seed would also open TorchTPU's device in this process.
        torch.default_generator.manual_seed(SEED)
        module = make_module()
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"{make_module!r} made {type(module).__name__}, not a torch.nn.Module",
                where="check_replicas",
                fix="Pass a module's class, or a function without arguments that returns a module.",
            )
        source = resolve_loader(module, batches, "train_dataloader")
        if source is None:
            source = _random_batches(module, batch_size)
        taken = list(itertools.islice(_repeated(_in_order(source, batch_size)), steps))
    shared = [map_tensors(_as_float32, batch) for batch in taken]
    for batch in shared:
        _check_divides(batch, devices)
    # In float32: rounding in bfloat16 would hide what the check looks for.
    return Workload(module.float(), shared, tuple(_differ_by_design(module)))


def _random_batches(module: nn.Module, batch_size: int) -> Iterable[Any]:
    example = getattr(module, "example_input_array", None)
    if example is None:
        raise UsageError(
            f"there is nothing to train {type(module).__name__} on",
            where="check_replicas",
            fix="Write train_dataloader in the module, or set its example_input_array to a tensor with the "
            "shape of a batch, or pass batches= in Python.",
        )
    return [map_tensors(lambda tensor: torch.randn(batch_size, *tensor.shape[1:]), example) for _ in range(8)]


def _in_order(source: Iterable[Any], batch_size: int) -> Iterable[Any]:
    if not isinstance(source, DataLoader):
        return source
    # In the dataset's order: a shuffle would draw another order in each of the two runs.
    return DataLoader(source.dataset, batch_size, collate_fn=source.collate_fn, drop_last=True)


def _repeated(batches: Iterable[Any]) -> Iterator[Any]:
    # Endless: the caller takes as many batches as there are steps, over several passes if needed.
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise UsageError(
                "the training data gave no full batch",
                where="check_replicas",
                fix="Check the dataset's length, or write a smaller batch_size.",
            )


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _records(batch: Any) -> int:
    """Return the size of the first dimension of the batch's first tensor."""
    sizes: list[int] = []
    map_tensors(lambda tensor: sizes.extend(tensor.shape[:1]), batch)
    return sizes[0] if sizes else 0


def _check_divides(batch: Any, devices: int) -> None:
    count = _records(batch)
    # Equal shares only: the mean over replicas gives each of them the same weight.
    if count == 0 or count % devices:
        raise UsageError(
            f"a batch of {count} records does not divide among {devices} replicas",
            where="check_replicas",
            fix="Make the first dimension of the batch's tensors the records, and their number a multiple of "
            f"{devices}.",
        )


def _share(batch: Any, ordinal: int, devices: int) -> Any:
    count = _records(batch)

    def mine(tensor: Tensor) -> Tensor:
        # A tensor of another length, such as a weight per class, holds no records, so all replicas get it.
        has_records = tensor.dim() > 0 and tensor.shape[0] == count
        return tensor.chunk(devices)[ordinal] if has_records else tensor

    return map_tensors(mine, batch)


def _differ_by_design(module: nn.Module) -> Iterator[str]:
    # These make the runs differ although nothing is wrong, so they are named beside the result.
    norms, dropouts = [], []
    for name, part in module.named_modules():
        label = f"{name or 'the module'} ({type(part).__name__})"
        if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm):
            norms.append(label)
        drops = part.p if isinstance(part, _DropoutNd) else getattr(part, "dropout", 0)
        if isinstance(drops, float) and drops > 0:
            dropouts.append(label)
    if norms:
        yield (
            f"not comparable: {', '.join(norms)} normalises each replica's share separately; on XLA, "
            "torch_xla.core.functions.SyncBatchNorm normalises the whole batch"
        )
    if dropouts:
        yield f"not comparable: {', '.join(dropouts)} drops at random; set its probability to 0 for the check"


def train(replica: Replica, workload: Workload) -> tuple[int, dict[str, Tensor]]:
    """Train on this replica's share of each batch; return the world size, and the parameters on the host.

    Raises:
        UsageError: a batch cannot be divided: on several hosts there are more replicas than one has devices.
    """
    for batch in workload.batches:
        _check_divides(batch, replica.world_size)
    # Copied, because replicas that are threads of one process all receive the same module.
    module = replica.setup(copy.deepcopy(workload.module)).train()
    accumulator = MetricAccumulator(replica)
    view = TrainerView(replica.world, FitOptions(), Progress())
    adapter = ModuleAdapter(module, accumulator, view, LightningCallbacks((), view))
    try:
        adapter.call("setup", "fit")
        optimizer, schedulers = configure_optimizers(module) if _configures(module) else (_sgd(module), None)
        for index, batch in enumerate(workload.batches):
            mine = replica.to_device(_share(batch, replica.ordinal, replica.world_size))
            accumulator.start_batch(mine, is_training=True)
            optimizer.zero_grad()
            _loss(module, adapter, mine, index).backward()
            replica.step(optimizer)
            if schedulers:
                schedulers.step_finished()
    finally:
        adapter.release()
    move_module(module, torch.device("cpu"))
    return replica.world_size, {name: parameter.detach() for name, parameter in module.named_parameters()}


def _configures(module: nn.Module) -> bool:
    return callable(getattr(module, "configure_optimizers", None))


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


def _loss(module: nn.Module, adapter: ModuleAdapter, batch: Any, index: int) -> Tensor:
    if callable(getattr(module, "training_step", None)):
        return adapter.loss(batch, index)
    output = module(*batch) if isinstance(batch, list | tuple) else module(batch)
    loss: Tensor = output.square().mean()
    return loss


def compare(alone: Mapping[str, Tensor], together: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return each parameter's relative difference, the largest first.

    Raises:
        UsageError: training on one replica produced NaN or infinity.
    """
    for name, parameter in alone.items():
        # A comparison with NaN would fail for every parameter and hide the reason.
        if not parameter.isfinite().all():
            raise UsageError(
                f"{name} is not finite after training on one replica",
                where="check_replicas",
                fix="Use a smaller learning rate or fewer steps.",
            )
    found = {
        name: max(_relative(parameter, other[name]) for other in together)
        for name, parameter in alone.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _relative(alone: Tensor, other: Tensor) -> float:
    distance = (alone.double() - other.double()).abs().max().item()
    if distance == 0:
        return 0.0
    scale = alone.double().abs().max().item()
    # Infinity for NaN too, because every comparison with NaN is false.
    return distance / scale if scale and distance < float("inf") else float("inf")
