"""Logged values: the step's last ones, and means by the number of records."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch

from polyxla import UsageError
from polyxla_training.metrics import MetricAccumulator, combine_totals


class _Everyone:
    """A replica beside others whose sums are known."""

    def __init__(self, *others: dict[str, tuple[float, float]]) -> None:
        self._others = others

    def all_gather(self, value: Any) -> list[Any]:
        return [value, *({name: (*total, "mean") for name, total in other.items()} for other in self._others)]


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


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        ("mean", 1.5),
        ("AVG", 1.5),
        (torch.mean, 1.5),
        ("max", 3.0),
        (torch.max, 3.0),
        (max, 3.0),
        ("min", 0.0),
        (min, 0.0),
        ("sum", 6.0),
        (torch.sum, 6.0),
    ],
)
@pytest.mark.parametrize("make", [float, torch.tensor], ids=["number", "tensor"])
def test_values_are_reduced_as_asked(reduce_fx: Any, expected: float, make: Callable[[float], Any]) -> None:
    meter = MetricAccumulator()
    for value in range(4):
        meter.start_batch(torch.zeros(2), is_training=True)
        meter.log("x", make(float(value)), on_epoch=True, reduce_fx=reduce_fx)
    state = meter.state_dict()
    assert _take(meter) == {"x": expected}
    meter.load_state_dict(state)
    meter.log("x", 3.0, on_epoch=True, reduce_fx=reduce_fx, batch_size=0)
    assert _take(meter) == {"x": expected}, "also after a resume; a batch of padding counts for nothing"


@pytest.mark.parametrize(
    ("kind", "expected"), [("mean", 25 / 12), ("sum", 25.0), ("min", 5.0), ("max", 20.0)]
)
def test_replicas_are_reduced_as_their_batches(kind: Any, expected: float) -> None:
    assert combine_totals([(20.0, 8, kind), (5.0, 4, kind)])[:2] == (
        (25.0, 12) if kind in ("mean", "sum") else (expected, 12)
    )
    meter = MetricAccumulator()
    meter.start_batch(torch.zeros(2), is_training=False)
    meter.log("x", torch.tensor(7.0), reduce_fx=kind)
    other: Any = SimpleNamespace(all_gather=lambda value: [value, {"x": (1.0, 1, kind)}, {}])
    results = {"mean": 15 / 3, "sum": 8.0, "min": 1.0, "max": 7.0}
    assert meter.take(other) == {"x": results[kind]}


@pytest.mark.parametrize(("kind", "expected"), [("mean", 2.0), ("sum", 4.0), ("min", 1.0), ("max", 3.0)])
def test_values_of_padding_records_do_not_count(kind: str, expected: float) -> None:
    meter = MetricAccumulator()
    valid = torch.tensor([True, True, False])
    meter.start_batch(torch.zeros(3), is_training=False, real=2, valid=valid)
    meter.log("x", torch.tensor([1.0, 3.0, float("nan")]), reduce_fx=kind)
    assert _take(meter) == {"x": expected}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"reduce_fx": "median"}, "reduce_fx='median' is not supported"),
        ({"reduce_fx": torch.std}, "reduce_fx=<built-in method std"),
        ({"reduce_fx": []}, r"reduce_fx=\[\] is not supported"),
        ({"on_epcoh": True}, "self.log has no argument 'on_epcoh'.*Write on_epoch=."),
        ({"zzz": 1}, "self.log has no argument 'zzz'.*Leave it out."),
        ({"enable_graph": True}, "enable_graph=True is not supported"),
        ({"sync_dist_group": "some"}, "sync_dist_group='some' is not supported"),
        ({"on_step": False}, "with neither on_step nor on_epoch the value would be dropped"),
        ({"on_step": False, "on_epoch": False}, "with neither on_step nor on_epoch"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_name(options: dict[str, Any], what: str) -> None:
    meter = MetricAccumulator()
    meter.start_batch(torch.zeros(2), is_training=True)
    with pytest.raises(UsageError, match=what) as caught:
        meter.log("x", 1.0, **options)
    assert caught.value.where == "self.log('x', ...)"


@pytest.mark.parametrize("options", [{"on_step": True}, {"on_epoch": False}])
def test_an_evaluation_has_no_steps(options: dict[str, Any]) -> None:
    meter = MetricAccumulator()
    meter.start_batch(torch.zeros(2), is_training=False)
    with pytest.raises(UsageError, match="on_step"):
        meter.log("x", 1.0, **options)


def test_one_name_has_one_reduction() -> None:
    meter = MetricAccumulator()
    meter.start_batch(torch.zeros(2), is_training=False)
    meter.log("x", 1.0, reduce_fx="max")
    with pytest.raises(UsageError, match="reduce_fx='sum' follows 'max'"):
        meter.log("x", 1.0, reduce_fx="sum")


def test_every_argument_of_lightnings_log_is_known_in_its_order() -> None:
    for name in ("log", "log_dict"):
        theirs = list(inspect.signature(getattr(lightning.LightningModule, name)).parameters)[1:]
        ours = list(inspect.signature(MetricAccumulator.log).parameters)[1:]
        if name == "log_dict":
            assert list(inspect.signature(MetricAccumulator.log_dict).parameters)[1] == theirs[0]
            assert [name for name in ours if name in theirs[1:]] == theirs[1:]
        else:
            assert ours == [*theirs, "unknown"]


def test_a_value_for_the_epoch_only_is_no_value_of_the_step() -> None:
    meter = MetricAccumulator()
    meter.start_batch(torch.zeros(2), is_training=True)
    meter.log("x", 1.0, on_step=False, on_epoch=True)
    assert meter.latest == {}
    assert _take(meter) == {"x": 1.0}


def test_a_value_without_a_logger_is_returned_and_not_shown() -> None:
    meter = MetricAccumulator()
    meter.start_batch(torch.zeros(2), is_training=True)
    meter.log_dict({"a": 1.0, "b": 2.0}, on_epoch=True, logger=False)
    meter.log("c", 3.0, on_epoch=True, logger=False, prog_bar=True)
    assert meter.without_hidden(meter.latest) == {"c": 3.0}
    means = _take(meter)
    assert means == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert meter.without_hidden(means) == {"c": 3.0}


def _on(ordinal: int) -> MetricAccumulator:
    sizes: Any = SimpleNamespace(
        is_first=ordinal == 0,
        world_size=2,
        device=torch.device("cpu"),
        all_reduce=lambda value, op: {"mean": value / 2, "sum": value * 2}[op],
    )
    return MetricAccumulator(sizes)


def test_a_value_of_the_first_replica_only() -> None:
    for ordinal, expected in ((0, {"x": 1.0}), (1, {})):
        meter = _on(ordinal)
        meter.start_batch(torch.zeros(2), is_training=True)
        meter.log("x", 1.0, rank_zero_only=True, logger=False)
        assert meter.latest == expected
        assert meter.hidden == {"x"}, "all replicas receive its mean"


def test_a_steps_value_is_combined_over_the_replicas_if_asked() -> None:
    meter = _on(1)
    meter.start_batch(torch.zeros(2), is_training=True)
    meter.log("own", torch.tensor(3.0))
    meter.log("all", torch.tensor(3.0), sync_dist=True)
    meter.log("number", 3, sync_dist=True, reduce_fx="sum")
    assert {name: float(value) for name, value in meter.latest.items()} == {
        "own": 3.0,
        "all": 1.5,
        "number": 6.0,
    }


def test_nothing_is_logged_when_nobody_would_see_it() -> None:
    meter = MetricAccumulator()
    with meter.refusing("on_validation_end"), pytest.raises(UsageError) as caught:
        meter.log("x", 1.0)
    assert str(caught.value) == (
        "'x' is logged in on_validation_end, when the epoch's metrics are computed already (from self.log). "
        "Log it in on_train_epoch_end or on_validation_epoch_end."
    )
    meter.log("x", 1.0)
    assert _take(meter) == {"x": 1.0}


def test_names_of_a_collection_of_metrics_have_their_prefix() -> None:
    class Collection:
        def compute(self) -> None: ...

        def items(self, keep_base: bool = True) -> Any:
            return {"a" if keep_base else "val_a": 1.0}.items()

    meter = MetricAccumulator()
    collection: Any = Collection()
    meter.log_dict(collection)
    assert _take(meter) == {"val_a": 1.0}


def test_a_metric_object_shows_its_latest_value() -> None:
    metric: Any = SimpleNamespace(compute=lambda: 0.5, reset=lambda: None, _forward_cache=torch.tensor(0.25))
    meter = MetricAccumulator()
    meter.start_batch(torch.zeros(2), is_training=True)
    meter.log("accuracy", metric)
    assert {name: float(value) for name, value in meter.latest.items()} == {"accuracy": 0.25}
    alone: Any = SimpleNamespace(all_gather=lambda value: [value], world_size=1)
    assert meter.take(alone) == {"accuracy": 0.5}
