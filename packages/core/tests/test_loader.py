"""A replica's loader: its position, resuming, padding, totals and errors."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from polyxla import Replica, UsageError, launch
from polyxla_testing import PluginInstaller


@pytest.fixture(autouse=True)
def _fake(install_plugin: PluginInstaller) -> None:
    install_plugin.hide_others()
    install_plugin.fake_runtime()


def _alone(function: Callable[[Replica], Any]) -> Any:
    return launch(function, runtime="fake", devices=1)[0]


def _numbers(count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=2)


def _values(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def test_the_position_counts_the_batches_that_the_loop_received() -> None:
    def read(replica: Replica) -> list[Any]:
        loader = replica.loader(_numbers(6))
        positions = [loader.state_dict()]
        positions += [loader.state_dict() for _ in loader]
        loader.finish_epoch()
        return [*positions, loader.state_dict()]

    states = _alone(read)
    assert [(state["epoch"], state["batches"]) for state in states] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 0),
    ]
    assert json.loads(json.dumps(states)) == states


def test_a_loader_resumes_in_mid_epoch_and_the_next_epoch_is_whole() -> None:
    def read(replica: Replica) -> Any:
        before = replica.loader(_numbers(6))
        next(iter(before))
        after = replica.loader(_numbers(6))
        after.load_state_dict(before.state_dict())
        size, first, count = len(after), _values(after), after.batches_before
        return size, first, count, _values(after), after.state_dict()["epoch"]

    assert _alone(read) == (2, [[2, 3], [4, 5]], 1, [[0, 1], [2, 3], [4, 5]], 1)


def test_an_epoch_of_which_nothing_is_left_ends_without_being_read() -> None:
    def read(replica: Replica) -> Any:
        before = replica.loader(_numbers(6))
        _values(before)
        after = replica.loader(_numbers(6))
        after.load_state_dict(before.state_dict())
        after.finish_epoch()
        return _values(after), after.state_dict()

    assert _alone(read) == ([[0, 1], [2, 3], [4, 5]], {"epoch": 1, "batches": 3})


def test_a_loop_that_was_left_early_begins_the_next_epoch() -> None:
    def read(replica: Replica) -> Any:
        loader = replica.loader(_numbers(6))
        for _ in loader:
            break
        return loader.state_dict(), _values(loader), loader.state_dict()

    left, values, after = _alone(read)
    assert left == {"epoch": 0, "batches": 1}
    assert values == [[0, 1], [2, 3], [4, 5]]
    assert (after["epoch"], after["batches"]) == (1, 3)


PROGRAMS = Path(__file__).parent / "programs"
SAMPLER = (PROGRAMS / "resumable_sampler.py").read_text()


def test_a_resumable_loader_resumes_at_its_own_position(
    install_plugin: PluginInstaller, capsys: pytest.CaptureFixture[str]
) -> None:
    install_plugin.listener("source", SAMPLER)

    def read(replica: Replica) -> Any:
        before = replica.loader([])
        reading = itertools.chain(before, before)
        for _ in range(8):
            next(reading)
        state = before.state_dict()
        after = replica.loader([])
        after.load_state_dict(state)
        return state, [batch.item() for batch in after], after.state_dict()

    state, values, after = _alone(read)
    assert state == {"epoch": 1, "batches": 3, "source": {"at": 3}}
    assert values == [103, 104]
    assert after == {"epoch": 1, "batches": 5, "source": {"at": 2}}, "of the iteration that began last"
    assert "divided for the test" not in capsys.readouterr().err, "for one replica nothing is divided"


def test_a_position_counts_the_batches_of_the_run_that_resumes(install_plugin: PluginInstaller) -> None:
    # As if the batches of the run that saves were twice as large.
    source = SAMPLER.replace('"at": batches', '"at": 2 * batches')
    length = "def __len__(self) -> int:\n        return 5 - self.start\n\n    def set_epoch"
    install_plugin.listener("source", source.replace("def set_epoch", length))

    def read(replica: Replica) -> Any:
        before, after = replica.loader([]), replica.loader([])
        for _ in itertools.islice(before, 2):
            pass
        after.load_state_dict(before.state_dict())
        return after.batches_before, len(after), [batch.item() for batch in after], after.state_dict()

    position, left, values, state = _alone(read)
    assert (position, left, values) == (4, 1, [4])
    assert state["batches"] == 5


def test_data_that_has_become_shorter_than_the_position_leaves_no_batch() -> None:
    def read(replica: Replica) -> Any:
        before = replica.loader(_numbers(6))
        _values(before)
        after = replica.loader(_numbers(2))
        after.load_state_dict(before.state_dict())
        return len(after), _values(after)

    assert _alone(read) == (0, [])


def test_a_samplers_note_is_printed_once(
    install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_plugin.listener("source", SAMPLER.replace("for the test", "among two"))
    monkeypatch.setenv("FAKE_DEVICES", "2")
    launch(lambda replica: [replica.loader([]) for _ in range(2)] and None, runtime="fake")
    assert capsys.readouterr().err.count("divided among two") == 1


def test_a_sampler_receives_the_seed_and_repeat(install_plugin: PluginInstaller) -> None:
    install_plugin.listener("source", SAMPLER)

    def ask(replica: Replica) -> Any:
        replica.seed_everything(7)
        loaders = replica.loader([]), replica.loader([], repeat=False)
        sources: list[Any] = [loader._source for loader in loaders]
        return [(source.seed, source.repeat) for source in sources]

    assert _alone(ask) == [(7, True), (7, False)]


class _Pair(NamedTuple):
    one: Any
    two: Any


@dataclasses.dataclass
class _Labelled:
    values: torch.Tensor
    label: str


@pytest.mark.parametrize(
    "batch",
    [
        MappingProxyType({"x": torch.ones(2), "note": None}),
        _Labelled(torch.ones(2), "a"),
        _Pair(torch.ones(2), {"deep": [torch.zeros(2)]}),
        {"none": None, "word": "b", "number": 3},
    ],
    ids=["mappingproxy", "dataclass", "named-tuple", "no-tensor"],
)
def test_containers_and_values_without_tensors_arrive_unchanged(batch: Any) -> None:
    def read(replica: Replica) -> Any:
        [arrived] = replica.loader([batch])
        return arrived

    arrived = _alone(read)
    assert type(arrived) is type(batch)
    assert repr(arrived) == repr(batch)


class _FailsAt37(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 37:
            raise LookupError("record 37 is missing its label")
        return torch.tensor(index)


def test_an_error_in_a_data_loader_worker_arrives_with_its_traceback() -> None:
    seen: list[Any] = []

    def read(replica: Replica) -> None:
        seen.extend(replica.loader(DataLoader(_FailsAt37(), batch_size=4, num_workers=2)))

    with pytest.raises(LookupError) as caught:
        _alone(read)
    assert len(seen) == 9, "the batches before the one with item 37"
    assert "in DataLoader worker process 1" in str(caught.value)
    assert "in __getitem__" in str(caught.value)


def test_an_empty_dataset_gives_no_batch() -> None:
    assert _alone(lambda replica: list(replica.loader(DataLoader(TensorDataset(torch.ones(0)))))) == []


def test_padding_gives_every_batch_one_shape_and_a_mask() -> None:
    def read(replica: Replica) -> Any:
        loader = replica.loader(_numbers(5), pad=True)
        return [(batch[0].tolist(), loader.valid.tolist(), loader.real) for batch in loader]

    full = [True, True]
    assert _alone(read) == [([0, 1], full, 2), ([2, 3], full, 2), ([4, 4], [True, False], 1)]


def test_totals_count_what_the_loop_received() -> None:
    def read(replica: Replica) -> Any:
        loader = replica.loader(_numbers(5))
        for _ in range(2):
            list(loader)
        assert replica.current_loader is loader
        return loader.batches, loader.records, loader.waited_s > 0

    assert _alone(read) == (6, 10, True)


class _Counting:
    """Counts how often the graph is cut."""

    def __init__(self, replica: Replica) -> None:
        self.syncs = 0
        sync = replica._replication.sync

        def counted(wait: bool = False) -> None:
            self.syncs += 1
            sync(wait)

        replica._replication.sync = counted  # type: ignore[method-assign]


def test_the_graph_is_cut_once_per_batch() -> None:
    def read(replica: Replica) -> Any:
        counting = _Counting(replica)
        weight = torch.nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in replica.loader([torch.ones(1)] * 4):
            weight.square().backward()
            replica.step(optimizer)
        stepping, counting.syncs = counting.syncs, 0
        for _ in replica.loader([torch.ones(1)] * 4):
            pass
        return stepping, counting.syncs

    # Four, and one more before the first batch or at the end.
    assert _alone(read) == (5, 5)


def test_an_unknown_prefetch_option_is_refused() -> None:
    with pytest.raises(UsageError, match="does not copy ahead and has no option loader_prefetch_size"):
        _alone(lambda replica: list(replica.loader([], prefetch={"loader_prefetch_size": 4})))


def _endless() -> Iterator[torch.Tensor]:
    for number in itertools.count():
        yield torch.tensor(number)


def test_a_loader_without_an_end_is_read_as_far_as_the_loop_goes() -> None:
    def read(replica: Replica) -> list[int]:
        return [batch.item() for batch in itertools.islice(replica.loader(_endless()), 3)]

    assert _alone(read) == [0, 1, 2]


class _Opaque:
    """A batch that only the user knows how to move."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


def test_batches_of_any_type_are_transferred_by_the_users_function_when_they_are_requested() -> None:
    def read(replica: Replica) -> Any:
        events: list[str] = []

        def batches() -> Iterator[Any]:
            for number in range(2):
                events.append(f"read {number}")
                yield _Opaque(torch.full((1,), float(number)))

        def transfer(batch: _Opaque) -> torch.Tensor:
            events.append(f"transfer {batch.values.item():.0f}")
            return replica.to_device(batch.values)

        loader = replica.loader(batches(), transfer=transfer)
        events.extend(f"train on {batch.item():.0f}" for batch in loader)
        return events

    assert _alone(read) == [
        f"{what} {number}" for number in (0, 1) for what in ("read", "transfer", "train on")
    ]


def test_padded_batches_are_transferred_with_their_mask() -> None:
    def read(replica: Replica) -> Any:
        loader = replica.loader(_numbers(3), pad=True, transfer=lambda batch: [batch[0] * 10])
        return [(batch[0].tolist(), loader.valid.tolist()) for batch in loader]

    assert _alone(read) == [([0, 10], [True, True]), ([20, 20], [True, False])]


def test_records_that_the_program_has_divided_are_not_divided_again(
    install_plugin: PluginInstaller, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DEVICES", "2")
    install_plugin.listener("every_nth", (PROGRAMS / "every_nth_sampler.py").read_text())

    def read(replica: Replica) -> tuple[list[list[int]], dict[str, Any]]:
        mine = TensorDataset(torch.arange(replica.ordinal, 8, replica.world_size))
        loader = replica.loader(DataLoader(mine, batch_size=2), divided=True)
        values = _values(itertools.islice(loader, 1))
        state = loader.state_dict()
        loader.load_state_dict(state)
        with pytest.raises(UsageError) as caught:
            loader.load_state_dict({**state, "parts": 4})
        assert str(caught.value).startswith(
            "the records were divided among 4 replica(s) by the program when the position was saved, and are "
            "divided among 2 replica(s) by the program now"
        )
        with pytest.raises(
            UsageError, match="by the program when the position was saved, and are divided by the sampler now"
        ):
            replica.loader(_numbers(8)).load_state_dict(state)
        return values + _values(loader), state

    results = launch(read, runtime="fake", devices=2)
    state = {"epoch": 0, "batches": 1, "parts": 2}
    assert results == [([[0, 2], [4, 6]], state), ([[1, 3], [5, 7]], state)]
    assert "DataLoader: each replica reads its own records, as divided=True says" in capsys.readouterr().err
