"""What a person's function holds: collectives over any value, its own records, events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from polyxla import BrokenPluginError, Replica, UsageError, hookimpl, launch
from polyxla.contracts.replication import ReduceOp
from polyxla.testing import PluginInstaller


class _Pair(NamedTuple):
    one: Any
    two: Any


@pytest.fixture(autouse=True)
def _four(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin.hide_others()
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "4")


def _everywhere(function: Callable[[Replica], Any], devices: Any = "auto") -> list[Any]:
    return launch(function, runtime="fake", devices=devices)


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
def test_all_reduce_of_nests(make: Callable[[int], Any], expected: Any) -> None:
    result = _same_everywhere(lambda replica: replica.all_reduce(make(VALUES[replica.ordinal])))
    assert result == expected
    assert type(result) is type(expected)


def test_all_reduce_of_a_nest_with_tensors() -> None:
    result = _same_everywhere(
        lambda replica: replica.all_reduce({"t": torch.tensor(float(replica.ordinal)), "n": 1}, "sum")
    )
    assert (result["t"].item(), result["n"]) == (6.0, 4)


def test_dicts_meet_key_by_key_in_whatever_order_they_were_filled() -> None:
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


def test_reduce_for_nobody() -> None:
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


def test_what_is_gathered_is_a_copy() -> None:
    def change(replica: Replica) -> list[int]:
        mine = [replica.ordinal]
        everyone: list[list[int]] = replica.all_gather(mine)
        mine.append(99)
        return everyone[replica.ordinal]

    assert _everywhere(change) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("source", [0, 3])
def test_broadcast(source: int) -> None:
    assert (
        _same_everywhere(lambda replica: replica.broadcast(f"of {replica.ordinal}", source)) == f"of {source}"
    )
    tensor = _same_everywhere(lambda replica: replica.broadcast(torch.tensor(replica.ordinal), source))
    assert tensor.item() == source


@pytest.mark.parametrize("source", [4, -1])
def test_broadcast_from_nobody(source: int) -> None:
    with pytest.raises(ValueError, match=f"source={source} is not an ordinal: 0 <= source < 4"):
        _everywhere(lambda replica: replica.broadcast(1, source))


def test_a_barrier_lets_nobody_through_early() -> None:
    arrived: list[int] = []

    def meet(replica: Replica) -> int:
        arrived.append(replica.ordinal)
        replica.barrier()
        return len(arrived)

    assert _everywhere(meet) == [4, 4, 4, 4]


def test_barriers_with_different_tags_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="replicas met under different tags"):
        _everywhere(lambda replica: replica.barrier("a" if replica.is_first else "b"))


def test_a_replica_knows_where_it_stands() -> None:
    seen = _everywhere(
        lambda replica: (
            replica.ordinal,
            replica.world_size,
            replica.is_first,
            replica.world.local_ordinal,
            replica.kind,
            replica.runtime,
            str(replica.device),
            replica.precision.name,
        )
    )
    assert seen == [(n, 4, n == 0, n, "FAKE", "fake", "cpu", "as-made") for n in range(4)]


def test_only_the_first_prints(capsys: pytest.CaptureFixture[str]) -> None:
    _everywhere(lambda replica: replica.print("ordinal", replica.ordinal, end="!"))
    assert capsys.readouterr().out == "ordinal 0!"


def test_the_runtimes_side_is_within_reach() -> None:
    def reach(replica: Replica) -> tuple[str, bool]:
        replica.seed_device(1)
        replica.sync(wait=True)
        moved = replica.to_device({"x": [torch.ones(1)], "name": "kept"})
        return replica.report(), moved == {"x": [torch.ones(1)], "name": "kept"}

    assert _everywhere(reach, 1) == [("fake runtime: replica 0 of 1", True)]


BATCHES = [torch.tensor([float(index)]) for index in range(8)]
EVERY_NTH = (Path(__file__).parent / "programs" / "every_nth_sampler.py").read_text()


def test_without_a_plugin_to_divide_records_several_replicas_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        _everywhere(lambda replica: replica.loader(BATCHES), 2)
    assert str(caught.value) == (
        "no installed plugin can divide the records of list among 2 replicas; "
        "all of them would train on the same records. "
        "Install one (pip install polyxla-sampler), or divide them yourself and use to_device."
    )


def test_a_plugin_divides_the_records(install_plugin: PluginInstaller) -> None:
    install_plugin.listener("every-nth", EVERY_NTH)

    def read(replica: Replica) -> tuple[int, list[float], list[float]]:
        loader = replica.loader(BATCHES)
        size = len(loader)
        return size, [batch.item() for batch in loader], [batch.item() for batch in loader]

    assert _everywhere(read, 2) == [(4, [0, 2, 4, 6], [0, 2, 4, 6]), (4, [1, 3, 5, 7], [1, 3, 5, 7])]
    import every_nth  # type: ignore[import-not-found]

    assert sorted(world.ordinal for world in every_nth.worlds) == [0, 1], "once per loader in each replica"


def test_one_replica_reads_everything_and_asks_no_plugin() -> None:
    assert _everywhere(lambda replica: [batch.item() for batch in replica.loader(BATCHES)], 1) == [
        [0, 1, 2, 3, 4, 5, 6, 7]
    ]


def test_a_loader_without_a_length_has_none() -> None:
    def length(replica: Replica) -> int:
        return len(replica.loader(iter(BATCHES)))

    with pytest.raises(TypeError, match="has no len"):
        _everywhere(length, 1)


class _Diary:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    @hookimpl
    def polyxla_step_finished(self, replica: Replica, step: int, logged: dict[str, Any]) -> None:
        self.heard.append((replica.ordinal, step, logged))

    @hookimpl
    def polyxla_replica_stopped(self, error: BaseException | None) -> None:
        self.heard.append(error)


def test_a_step_averages_gradients_updates_and_is_heard() -> None:
    def train(replica: Replica) -> tuple[list[Any], float, int]:
        diary = _Diary()
        replica.add_listener(diary)
        weight = torch.nn.Parameter(torch.tensor(10.0))
        unused = torch.nn.Parameter(torch.tensor(1.0))
        optimizer = torch.optim.SGD([weight, unused], lr=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            (weight * replica.ordinal).backward()
            replica.step(optimizer, {"loss": replica.ordinal} if replica.ordinal else None)
        return diary.heard, weight.item(), replica.steps

    for ordinal, (heard, weight, steps) in enumerate(_everywhere(train)):
        assert weight == 10.0 - 2 * (0 + 1 + 2 + 3) / 4
        assert steps == 2
        logged = {"loss": ordinal} if ordinal else {}
        assert heard == [(ordinal, 1, logged), (ordinal, 2, logged), None]


class _Misspelt:
    @hookimpl
    def polyxla_step_finishd(self, step: int) -> None:
        pass


def test_a_misspelt_listener_is_refused_where_it_is_added() -> None:
    with pytest.raises(BrokenPluginError) as caught:
        _everywhere(lambda replica: replica.add_listener(_Misspelt()), 1)
    assert "listener '_Misspelt' does not match polyxla's hooks: unknown hook" in str(caught.value)
    assert str(caught.value).endswith("Did you mean 'polyxla_step_finished'?")


class _Broken:
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from BATCHES[:2]
        raise OSError("record 2 is broken")


def test_a_loaders_error_reaches_the_loop_after_the_batches_before_it() -> None:
    seen: list[float] = []

    def read(replica: Replica) -> None:
        seen.extend(batch.item() for batch in replica.loader(_Broken()))

    with pytest.raises(OSError, match="record 2 is broken"):
        _everywhere(read, 1)
