"""A replica gives the user's function its device, its records and its events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyxla import BrokenPluginError, Replica, UsageError, hookimpl, launch
from polyxla_testing import PluginInstaller


@pytest.fixture(autouse=True)
def _four(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin.hide_others()
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "4")


def _everywhere(function: Callable[[Replica], Any], devices: Any = "auto") -> list[Any]:
    return launch(function, runtime="fake", devices=devices)


def test_a_replica_knows_its_world_and_its_device() -> None:
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


def test_printing_takes_all_of_prints_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    _everywhere(lambda replica: replica.print("flushed", flush=True))
    assert capsys.readouterr().out == "flushed\n"


def test_a_replica_forwards_to_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []

    def reach(replica: Replica) -> tuple[str, bool]:
        before = replica.rng_state()["device"]
        replica.seed_device(1)
        assert replica.rng_state()["device"] != before
        monkeypatch.setattr(replica._replication, "sync", waits.append)
        replica.sync(wait=True)
        moved = replica.to_device({"x": [torch.ones(1)], "name": "kept"})
        return replica.report(), moved == {"x": [torch.ones(1)], "name": "kept"}

    assert _everywhere(reach, 1) == [("fake runtime: replica 0 of 1", True)]
    assert waits == [True]


@pytest.mark.parametrize(
    ("name", "instead"), [("backward", ": write loss.backward()"), ("prepare_modle", ""), ("is_frist", "")]
)
def test_a_method_of_another_library_is_an_error_that_says_what_to_write(name: str, instead: str) -> None:
    with pytest.raises(AttributeError) as caught:
        _everywhere(lambda replica: getattr(replica, name), 1)
    assert str(caught.value) == f"'Replica' object has no attribute {name!r}{instead}"


BATCHES = [torch.tensor([float(index)]) for index in range(8)]
EVERY_NTH = (Path(__file__).parent / "programs" / "every_nth_sampler.py").read_text()


def test_without_a_plugin_to_divide_records_several_replicas_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        _everywhere(lambda replica: replica.loader(BATCHES), 2)
    assert str(caught.value) == (
        "no installed plugin can divide the records of list among 2 replicas; "
        "all of them would train on the same records. "
        "Install one (pip install ./packages/sampler), or divide them yourself and write "
        "replica.loader(loader, divided=True)."
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


def test_one_replica_reads_everything_without_a_plugin() -> None:
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


def test_a_step_averages_gradients_updates_and_notifies_listeners() -> None:
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
    assert seen == [0.0, 1.0]
