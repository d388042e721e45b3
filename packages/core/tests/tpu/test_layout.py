"""The numbers of replicas in a layout."""

from __future__ import annotations

from polyxla.tpu.layout import Layout


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
