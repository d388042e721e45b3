"""One seed gives the same numbers again, different ones in every replica, and a state to resume from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import polyxla
from polyxla import Replica, launch
from polyxla.contracts.replication import World
from polyxla.replica import random_state
from polyxla_testing import PluginInstaller


@pytest.fixture(autouse=True)
def _fake(install_plugin: PluginInstaller, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_plugin.hide_others()
    install_plugin.fake_runtime()
    monkeypatch.setenv("FAKE_DEVICES", "4")
    before = random_state.host_state()
    yield
    random_state.restore_host_state(before)


def _draw() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), float(np.random.random())  # noqa: NPY002


def _everywhere(function: Callable[[Replica], Any], devices: int = 4) -> list[Any]:
    return launch(function, runtime="fake", devices=devices)


def test_one_seed_reaches_every_generator_of_the_process() -> None:
    polyxla.seed_everything(5)
    first = _draw()
    polyxla.seed_everything(5)
    assert _draw() == first
    polyxla.seed_everything(6)
    assert all(mine != other for mine, other in zip(_draw(), first, strict=True))


def test_a_large_seed_is_shortened_for_numpy_only() -> None:
    polyxla.seed_everything(2**40 + 3)
    assert torch.initial_seed() == 2**40 + 3


def test_every_part_and_every_seed_gives_another_stream() -> None:
    seeds = {
        random_state.derive(seed, use, ordinal) for seed in range(9) for use in "ab" for ordinal in range(9)
    }
    assert len(seeds) == 9 * 2 * 9
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert random_state.derive(1, 23) != random_state.derive(12, 3)


def test_devices_are_seeded_differently_from_torchs_seed() -> None:
    def device_seed(replica: Replica) -> int:
        return replica.rng_state()["device"]  # type: ignore[no-any-return]

    torch.manual_seed(3)
    first = _everywhere(device_seed)
    torch.manual_seed(3)
    assert _everywhere(device_seed) == first
    assert len(set(first)) == 4
    torch.manual_seed(4)
    assert not set(_everywhere(device_seed)) & set(first)


def test_a_launch_does_not_change_the_hosts_random_numbers() -> None:
    polyxla.seed_everything(5)
    alone = _draw()
    polyxla.seed_everything(5)
    _everywhere(lambda _: None, 1)
    assert _draw() == alone


def test_seeding_a_replica_seeds_its_device() -> None:
    def seeded(replica: Replica) -> Any:
        replica.seed_everything(9)
        return _draw(), replica.rng_state()["device"], replica.data_seed

    [drawn] = _everywhere(seeded, 1)
    assert _everywhere(seeded, 1) == [drawn]
    assert drawn[2] == 9, "the order of records is the same in every replica"
    assert drawn[1] != 9


def test_replicas_that_share_a_process_seed_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(random_state, "seed_everything", seeds.append)
    _everywhere(lambda replica: replica.seed_everything(9))
    assert len(seeds) == 1


def test_each_process_has_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(random_state, "seed_everything", seeds.append)

    def seed(replica: Replica) -> None:
        for ordinal in (0, 1, 0):
            # As in processes of one replica each.
            world = World(world_size=2, process_count=2, ordinal=ordinal, process_index=ordinal)
            replica.world = replica.data_world = world
            replica.seed_everything(9)

    _everywhere(seed, 1)
    first, other, again = seeds
    assert first == again != other


def test_random_numbers_resume_from_a_state() -> None:
    def resume(replica: Replica) -> Any:
        replica.seed_everything(1)
        random.gauss(0, 1)
        _draw()
        state = replica.rng_state()
        after = _draw(), random.gauss(0, 1)
        replica.seed_everything(2)
        replica.restore_rng(state)
        return after, (_draw(), random.gauss(0, 1))

    [(expected, found)] = _everywhere(resume, 1)
    assert found == expected
