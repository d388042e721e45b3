"""Collectives combine any value, in ordinal order, and give every replica the same result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from polyxla import DisagreementError, Replica, launch
from polyxla.contracts.replication import ReduceOp
from polyxla.replica import consistency
from polyxla_testing import PluginInstaller


class _Pair(NamedTuple):
    one: Any
    two: Any


@pytest.fixture(autouse=True)
def _four(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin.hide_others()
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "4")


def _everywhere(function: Callable[[Replica], Any]) -> list[Any]:
    return launch(function, runtime="fake")


def _same_everywhere(function: Callable[[Replica], Any]) -> Any:
    first, *others = _everywhere(function)
    assert all(repr(other) == repr(first) for other in others)
    return first


# Of the values 1, 2, 3, 7 in the four replicas.
REDUCED = {"sum": 13, "mean": 3.25, "min": 1, "max": 7, "mul": 42, "and": 0, "or": 7}
# Of True, True, False, True.
REDUCED_BOOLS = {"sum": 3, "mean": 0.75, "min": False, "max": True, "mul": 0, "and": False, "or": True}
VALUES, BOOLS = (1, 2, 3, 7), (True, True, False, True)


@pytest.mark.parametrize("op", REDUCED)
def test_all_reduce_of_numbers(op: ReduceOp) -> None:
    result = _same_everywhere(lambda replica: replica.all_reduce(VALUES[replica.ordinal], op))
    assert result == REDUCED[op]
    assert not isinstance(result, torch.Tensor)


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "mul"])
def test_all_reduce_of_floats(op: ReduceOp) -> None:
    result = _same_everywhere(lambda replica: replica.all_reduce(float(VALUES[replica.ordinal]), op))
    assert (result, type(result)) == (REDUCED[op], float)


@pytest.mark.parametrize("op", REDUCED_BOOLS)
def test_all_reduce_of_bools(op: ReduceOp) -> None:
    result = _same_everywhere(lambda replica: replica.all_reduce(BOOLS[replica.ordinal], op))
    assert result == REDUCED_BOOLS[op]
    assert isinstance(result, bool) is (op in {"min", "max", "and", "or"})


@pytest.mark.parametrize("op", REDUCED)
def test_all_reduce_of_tensors(op: ReduceOp) -> None:
    result = _same_everywhere(
        lambda replica: replica.all_reduce(torch.tensor([VALUES[replica.ordinal], 1]), op)
    )
    assert result.tolist() == [REDUCED[op], {"sum": 4, "mean": 1}.get(op, 1)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda n: {"n": n, "deep": {"m": n}}, {"n": 13, "deep": {"m": 13}}, id="dict"),
        pytest.param(lambda n: [n, [n, 1]], [13, [13, 4]], id="list"),
        pytest.param(lambda n: (n, 2 * n), (13, 26), id="tuple"),
        pytest.param(lambda n: _Pair(n, {"m": n}), _Pair(13, {"m": 13}), id="named-tuple"),
        pytest.param(lambda _: {}, {}, id="empty"),
    ],
)
def test_all_reduce_of_pytrees(make: Callable[[int], Any], expected: Any) -> None:
    result = _same_everywhere(lambda replica: replica.all_reduce(make(VALUES[replica.ordinal])))
    assert result == expected
    assert type(result) is type(expected)


def test_all_reduce_of_a_pytree_with_tensors() -> None:
    result = _same_everywhere(
        lambda replica: replica.all_reduce({"t": torch.tensor(float(replica.ordinal)), "n": 1}, "sum")
    )
    assert (result["t"].item(), result["n"]) == (6.0, 4)


def test_dicts_are_reduced_key_by_key_whatever_their_order() -> None:
    def reduce(replica: Replica) -> dict[str, int]:
        names = ["a", "b"] if replica.ordinal % 2 else ["b", "a"]
        combined: dict[str, int] = replica.all_reduce({name: {"a": 1, "b": 100}[name] for name in names})
        assert list(combined) == names
        return dict(sorted(combined.items()))

    assert _same_everywhere(reduce) == {"a": 4, "b": 400}


@pytest.mark.parametrize(
    ("op", "make", "expected"),
    [
        pytest.param("or", lambda n: {n}, {1, 2, 3, 7}, id="sets-united"),
        pytest.param("and", lambda n: {n, 0}, {0}, id="sets-met"),
        pytest.param("sum", lambda n: Counter({"a": n}), Counter({"a": 13}), id="counters"),
        pytest.param("sum", str, "1237", id="text"),
        pytest.param("max", lambda n: f"of {n}", "of 7", id="last-text"),
    ],
)
def test_all_reduce_of_other_objects(op: ReduceOp, make: Callable[[int], Any], expected: Any) -> None:
    assert _same_everywhere(lambda replica: replica.all_reduce(make(VALUES[replica.ordinal]), op)) == expected


@pytest.mark.parametrize("destination", [0, 3])
def test_reduce_gives_one_replica_the_result(destination: int) -> None:
    def reduce(replica: Replica) -> Any:
        value = {"n": VALUES[replica.ordinal], "t": torch.tensor([1.0])}
        return replica.reduce(value, destination=destination)

    results = _everywhere(reduce)
    assert results.pop(destination) == {"n": 13, "t": torch.tensor([4.0])}
    assert results == [None, None, None]


def test_reduce_takes_every_operation() -> None:
    results = _everywhere(lambda replica: replica.reduce(VALUES[replica.ordinal], "mul", destination=1))
    assert results == [None, 42, None, None]


def test_reduce_refuses_a_destination_that_is_not_an_ordinal() -> None:
    with pytest.raises(ValueError, match="destination=4 is not an ordinal: 0 <= destination < 4"):
        _everywhere(lambda replica: replica.reduce(1, destination=4))


def test_all_gather_is_in_ordinal_order() -> None:
    assert _same_everywhere(lambda replica: replica.all_gather({"n": replica.ordinal})) == [
        {"n": 0},
        {"n": 1},
        {"n": 2},
        {"n": 3},
    ]
    tensors = _same_everywhere(lambda replica: replica.all_gather(torch.full((2,), replica.ordinal)))
    assert [tensor.tolist() for tensor in tensors] == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_gathered_objects_are_copies() -> None:
    def change(replica: Replica) -> list[int]:
        mine = [replica.ordinal]
        everyone: list[list[int]] = replica.all_gather(mine)
        mine.append(99)
        return everyone[replica.ordinal]

    assert _everywhere(change) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("source", [0, 3])
def test_broadcast_returns_the_value_of_the_source(source: int) -> None:
    assert (
        _same_everywhere(lambda replica: replica.broadcast(f"of {replica.ordinal}", source)) == f"of {source}"
    )
    tensor = _same_everywhere(lambda replica: replica.broadcast(torch.tensor(replica.ordinal), source))
    assert tensor.item() == source


@pytest.mark.parametrize("source", [4, -1])
def test_broadcast_refuses_a_source_that_is_not_an_ordinal(source: int) -> None:
    with pytest.raises(ValueError, match=f"source={source} is not an ordinal: 0 <= source < 4"):
        _everywhere(lambda replica: replica.broadcast(1, source))


def test_a_barrier_waits_for_every_replica() -> None:
    arrived: list[int] = []

    def meet(replica: Replica) -> int:
        arrived.append(replica.ordinal)
        replica.barrier("a tag of\ntwo lines")
        return len(arrived)

    assert _everywhere(meet) == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda replica, n: replica.barrier("ab"[n]), r"barrier \([ab]\) and replica \d barrier \([ab]\)"),
        (lambda replica, n: replica.all_gather(1) if n else replica.barrier(), r"all_gather of an object"),
        (lambda replica, n: replica.all_reduce(1, ("max", "min")[n]), r"all_reduce \(m..\) of an object and"),
        (lambda replica, n: replica.all_reduce({"ab"[n]: 1}), r"of an object at \['.'\] and .* at \['.'\]\."),
        (lambda replica, n: replica.all_reduce([1, {n: 1}]), r"of an object at \[1\]\[\d\] and"),
        (
            lambda replica, n: replica.all_reduce(np.ones([1, 2 + n])),
            r"of float64\[1, \d\] and .* of float64",
        ),
        (lambda replica, n: replica.all_reduce(np.ones(2, "if"[n])), r"of (int|float)32\[2\] and"),
        (lambda replica, n: replica.broadcast(1, n), r"broadcast \(source \d\) of an object and"),
        (lambda replica, n: replica.broadcast(torch.ones(1), n), r"broadcast \(source \d\) of a tensor and"),
    ],
)
def test_calls_that_differ_are_an_error(call: Callable[[Replica, int], Any], text: str) -> None:
    with pytest.raises(DisagreementError, match=rf"in the same turn, replica \d calls .*{text}"):
        _everywhere(lambda replica: call(replica, int(replica.is_first)))


def test_tensors_of_one_dtype_are_averaged_in_few_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "BUCKET_BYTES", 28)
    tensors = [
        torch.ones(2, 3),
        torch.full((2,), 4, dtype=torch.bfloat16),
        torch.full((), 6.0),
        torch.zeros(9),
    ]
    added: list[tuple[int, ...]] = []

    def add_up(flat: torch.Tensor) -> None:
        added.append(tuple(flat.shape))
        flat.mul_(2)

    consistency.average_in_place(tensors, add_up, 4)
    assert added == [(2,), (7,), (9,)]
    assert [tensor.tolist() for tensor in tensors] == [[[0.5] * 3] * 2, [2.0, 2.0], 3.0, [0.0] * 9]
