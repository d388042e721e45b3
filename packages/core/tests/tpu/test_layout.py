"""The numbers of replicas in a layout."""

from __future__ import annotations

import pytest

from polyxla.errors import UsageError
from polyxla.tpu import env
from polyxla.tpu.layout import Layout, plan_chips
from polyxla.tpu.slices import this_slice


def test_ordinals_count_through_threads_then_processes_then_hosts() -> None:
    layout = Layout(threads=2, processes=2, hosts=2)
    worlds = [layout.world(process, thread) for process in range(4) for thread in range(2)]
    assert [world.ordinal for world in worlds] == list(range(8))
    assert [world.local_ordinal for world in worlds] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [world.process_index for world in worlds] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [world.host_index for world in worlds] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {
        (world.world_size, world.local_world_size, world.process_count, world.host_count) for world in worlds
    } == {(8, 4, 4, 2)}


def test_some_chips_of_several_slices_are_refused() -> None:
    environ = {env.POLYXLA_EMULATE: "2xv4-8"}
    with pytest.raises(UsageError, match="the 2 slices' 2 hosts must use all their chips"):
        plan_chips(environ, this_slice(environ), (0, 1))
