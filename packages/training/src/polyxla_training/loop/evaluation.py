"""Running ``validation_step``, ``test_step`` or ``predict_step`` over a loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import islice
from typing import Any, Literal

import torch

from polyxla.plugin import Loader, map_tensors
from polyxla_training.lightning.data import divisible_by_batches
from polyxla_training.loop.workspace import Workspace, no_batch
from polyxla_training.metrics import MetricAccumulator
from polyxla_training.progress import Progress

StepKind = Literal["validation", "test", "predict"]
_KINDS: dict[str, tuple[StepKind, str]] = {
    "validate": ("validation", "val"),
    "test": ("test", "test"),
    "predict": ("predict", "predict"),
}
"""The Trainer's methods: the kind of their steps, and of their loaders."""


def evaluate_call(work: Workspace, data: Iterable[Any] | None) -> None:
    """Carry out ``Trainer.validate``, ``Trainer.test`` or ``Trainer.predict``."""
    kind, short = _KINDS[work.call.stage]
    found = work.data.find(data, f"{short}_dataloader")
    if kind == "predict" and work.replica.world_size > 1:
        found = divisible_by_batches(found)
    loader = work.load(found, kind)
    work.adapter.require(kind)
    evaluate(work, loader, kind)


@torch.no_grad()
def evaluate(work: Workspace, loader: Loader, kind: StepKind) -> None:
    """Run a step over a loader, with the hooks around it in Lightning's order.

    Args:
        work: the replica's module and metrics.
        loader: the batches, on the device.
        kind: which step.

    Raises:
        UsageError: there was no batch to validate or test on.
    """
    replica, adapter, metrics = work.replica, work.adapter, work.metrics
    precision, after_transfer = replica.precision, work.data.after_transfer
    on_batch_start = adapter.hook(f"on_{kind}_batch_start")
    on_batch_end = adapter.hook(f"on_{kind}_batch_end")
    read = 0
    with _in_phase(work.progress, kind), adapter.evaluating(kind):
        metrics.outside_batches()
        adapter.call(f"on_{kind}_start")
        adapter.call(f"on_{kind}_epoch_start")
        # Closing ends the runtime's threads, which read ahead of the limit.
        with closing(iter(loader)) as arriving:
            for index, arrived in enumerate(islice(arriving, work.limit_of(loader, kind))):
                read += 1
                batch = after_transfer(arrived, 0) if after_transfer else arrived
                metrics.start_batch(batch, is_training=False, real=loader.real, valid=loader.valid)
                # A batch of repeats is computed only for the other replicas' collectives.
                with metrics.set_aside() if loader.is_repeat else nullcontext():
                    if on_batch_start:
                        on_batch_start(batch, index)
                    with precision.forward_context():
                        outputs = adapter.evaluate(kind, precision.convert_input(batch), index, loader.valid)
                        if kind == "predict":
                            outputs = map_tensors(precision.convert_output, outputs)
                    if on_batch_end:
                        on_batch_end(outputs, batch, index)
                if kind == "predict" and not loader.is_repeat:
                    work.predictions.append(_on_host(outputs, metrics))
        # A limit may have left batches unread.
        # The next iteration must begin at the first batch again.
        loader.finish_epoch()
        # All replicas decide together: with few batches, some replicas may have read none, and that is fine.
        if kind != "predict" and not any(replica.all_gather(read)):
            raise no_batch(kind)
        metrics.outside_batches()
        adapter.call(f"on_{kind}_epoch_end")
        work.publish()
        adapter.call_last(f"on_{kind}_end")


@contextmanager
def _in_phase(progress: Progress, kind: StepKind) -> Iterator[None]:
    before, progress.phase = progress.phase, kind
    yield
    progress.phase = before


def _on_host(outputs: Any, metrics: MetricAccumulator) -> Any:
    """Return copies on the host, without the rows of padding records."""
    real, padded = metrics.batch_size, metrics.valid

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().cpu()
        is_padded = padded is not None and tensor.dim() > 0 and len(tensor) == len(padded)
        return tensor[:real] if is_padded else tensor

    return map_tensors(copied, outputs)
