"""Running ``validation_step``, ``test_step`` or ``predict_step`` over a loader."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import islice
from typing import Any

import torch

from polyxla import Replica, UsageError
from polyxla.plugin import Loader, map_tensors
from polyxla_training.lightning.data import Data
from polyxla_training.lightning.trainer_view import TrainerView
from polyxla_training.metrics import MetricAccumulator
from polyxla_training.module_adapter import ModuleAdapter


@torch.no_grad()
def evaluate(
    loader: Loader,
    kind: str,
    replica: Replica,
    adapter: ModuleAdapter,
    accumulator: MetricAccumulator,
    data: Data,
    view: TrainerView,
    publish: Callable[[], None],
    batches: int | None,
    predictions: list[Any],
) -> None:
    """Run a step over a loader, with the hooks around it in Lightning's order.

    Args:
        loader: the batches, on the device.
        kind: ``validation``, ``test`` or ``predict``.
        replica: its precision policy converts the batches.
        adapter: the module.
        accumulator: receives the logged values.
        data: has the hook after the batches' transfer.
        view: what the module sees as ``self.trainer``.
        publish: computes and publishes the metrics.
        batches: number of batches to read; None for all.
        predictions: receives what ``predict_step`` returns, on the host and without padding.

    Raises:
        UsageError: there was no batch to validate or test on.
    """
    precision = replica.precision
    on_batch_start = adapter.hook(f"on_{kind}_batch_start")
    on_batch_end = adapter.hook(f"on_{kind}_batch_end")
    read = 0
    with view.evaluating(kind), adapter.evaluating(kind):
        accumulator.outside_batches()
        adapter.call(f"on_{kind}_start")
        adapter.call(f"on_{kind}_epoch_start")
        # Closing ends the runtime's threads, which read ahead of the limit.
        with closing(iter(loader)) as arriving:
            for index, arrived in enumerate(islice(arriving, batches)):
                read += 1
                batch = data.after_transfer(arrived, 0) if data.after_transfer else arrived
                accumulator.start_batch(batch, is_training=False, real=loader.real, valid=loader.valid)
                if on_batch_start:
                    on_batch_start(batch, index)
                with precision.forward_context():
                    outputs = adapter.evaluate(kind, precision.convert_input(batch), index, loader.valid)
                    if kind == "predict":
                        outputs = map_tensors(precision.convert_output, outputs)
                if on_batch_end:
                    on_batch_end(outputs, batch, index)
                if kind == "predict":
                    predictions.append(_on_host(outputs, accumulator))
        # A limit may have left batches unread.
        loader.finish_epoch()
        # The means of nothing: of a replica alone, the others may have read the few batches that there are.
        if kind != "predict" and not any(replica.all_gather(read)):
            raise no_batch(kind)
        accumulator.outside_batches()
        adapter.call(f"on_{kind}_epoch_end")
        publish()
        adapter.call_last(f"on_{kind}_end")


def no_batch(kind: str) -> UsageError:
    """Return the error of a loader without batches; `kind` as for `evaluate`, or ``training``."""
    skip = "; to train without validation, leave it out" if kind == "validation" else ""
    return UsageError(
        f"the {kind} loader gave no batch",
        where="Trainer.fit" if kind == "training" else "Trainer",
        fix=f"Check its dataset's length, and drop_last if the batch is larger than the dataset{skip}.",
    )


def _on_host(outputs: Any, accumulator: MetricAccumulator) -> Any:
    real, padded = accumulator.batch_size, accumulator.valid

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().cpu()
        is_padded = padded is not None and tensor.dim() > 0 and len(tensor) == len(padded)
        return tensor[:real] if is_padded else tensor

    return map_tensors(copied, outputs)
