"""Logged values: the step's last ones, and means by the number of records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyxla_training.metrics import MetricAccumulator


class _Everyone:
    """A replica beside others whose sums are known."""

    def __init__(self, *others: dict[str, tuple[float, float]]) -> None:
        self._others = others

    def all_gather(self, value: Any) -> list[Any]:
        return [value, *self._others]


def _take(meter: MetricAccumulator, *others: dict[str, tuple[float, float]]) -> dict[str, float]:
    return meter.take(_Everyone(*others))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "records"),
    [
        pytest.param(torch.zeros(5, 2), 5, id="tensor"),
        pytest.param((torch.zeros(3, 2), torch.zeros(7)), 3, id="pair"),
        pytest.param({"name": "x", "x": torch.zeros(4)}, 4, id="dict"),
        pytest.param(["a", {"deep": [torch.zeros(6, 1)]}], 6, id="pytree"),
        pytest.param(torch.tensor(1.0), 1, id="scalar"),
        pytest.param("no tensor", 1, id="text"),
        pytest.param([], 1, id="empty"),
    ],
)
def test_the_weight_is_the_first_tensors_length(batch: Any, records: int) -> None:
    meter = MetricAccumulator()
    meter.start_batch(batch, is_training=False)
    assert meter.batch_size == records


@pytest.mark.parametrize(
    "make", [float, torch.tensor, lambda x: torch.tensor([x])], ids=["number", "0-d", "1-d"]
)
def test_means_are_weighted_by_records_exactly(make: Callable[[float], Any]) -> None:
    meter = MetricAccumulator()
    for value, size in ((1.0, 3), (5.0, 1), (0.25, 4)):
        meter.start_batch(torch.zeros(size), is_training=False)
        meter.log("loss", make(value))
    assert _take(meter) == {"loss": (3 * 1.0 + 5.0 + 4 * 0.25) / 8}
    assert _take(meter) == {}, "a mean is taken once"


def test_an_explicit_batch_size_wins() -> None:
    meter = MetricAccumulator()
    meter.start_batch(torch.zeros(100), is_training=False)
    meter.log("loss", 1.0, batch_size=1)
    meter.log("loss", 4.0, batch_size=2)
    assert _take(meter) == {"loss": 3.0}


def test_means_are_over_all_replicas_records_and_names_may_differ() -> None:
    meter = MetricAccumulator()
    meter.start_batch(torch.zeros(2), is_training=False)
    meter.log_dict({"b": 1.0, "a": 2.0})
    means = _take(meter, {"a": (40.0, 8.0)}, {"c": (3.0, 2.0)}, {})
    assert means == {"a": (2 * 2.0 + 40.0) / 10, "b": 1.0, "c": 1.5}
    assert list(means) == ["a", "b", "c"]


def test_a_training_step_keeps_its_latest_values_only() -> None:
    meter = MetricAccumulator()
    meter.start_batch(torch.zeros(2), is_training=True)
    meter.log("loss", 1.0, True, on_step=True)
    meter.log("seen", 7, prog_bar=True)
    assert meter.latest == {"loss": 1.0, "seen": 7}
    meter.start_batch(torch.zeros(2), is_training=True)
    assert meter.latest == {}
    assert _take(meter) == {}


@pytest.mark.parametrize(
    ("is_training", "on_epoch", "is_kept"),
    [
        (True, None, False),
        (True, True, True),
        (True, False, False),
        (False, None, True),
        (False, False, False),
    ],
)
def test_which_values_are_averaged_over_the_epoch(
    is_training: bool, on_epoch: bool | None, is_kept: bool
) -> None:
    meter = MetricAccumulator()
    meter.start_batch(torch.zeros(2), is_training=is_training)
    meter.log("loss", 1.0, on_epoch=on_epoch)
    assert bool(_take(meter)) is is_kept


def test_the_graph_of_a_logged_tensor_is_released() -> None:
    meter = MetricAccumulator()
    meter.start_batch(torch.zeros(2), is_training=True)
    meter.log("loss", torch.ones((), requires_grad=True) * 2, on_epoch=True)
    assert not meter.latest["loss"].requires_grad
    assert _take(meter) == {"loss": 2.0}


@pytest.mark.parametrize(
    ("dtype", "value", "size"),
    [
        pytest.param(torch.float16, 700.0, 128, id="float16-would-overflow"),
        pytest.param(torch.bfloat16, 1.0, 257, id="bfloat16-would-round"),
        pytest.param(torch.float64, 1 / 3, 3, id="float64-would-be-cut"),
        pytest.param(torch.int64, 3, 5, id="int"),
        pytest.param(torch.bool, True, 5, id="bool"),
    ],
)
def test_means_keep_their_precision(dtype: torch.dtype, value: float, size: int) -> None:
    meter = MetricAccumulator()
    for _ in range(2):
        meter.start_batch(torch.zeros(size), is_training=False)
        meter.log("value", torch.tensor(value, dtype=dtype))
    assert _take(meter) == {"value": pytest.approx(float(value), rel=1e-12)}


def test_numbers_and_tensors_mix() -> None:
    for first, second in ((1.0, torch.tensor(3.0)), (torch.tensor(1.0), 3.0)):
        meter = MetricAccumulator()
        meter.start_batch(torch.zeros(1), is_training=False)
        meter.log("loss", first)
        meter.log("loss", second)
        assert _take(meter) == {"loss": 2.0}
