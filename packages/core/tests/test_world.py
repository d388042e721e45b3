"""World refuses impossible numbers."""

from __future__ import annotations

from typing import Any

import pytest

from polyxla.plugin import World


def test_the_default_world_has_one_replica() -> None:
    world = World()
    assert (world.world_size, world.ordinal, world.local_world_size, world.process_count) == (1, 0, 1, 1)
    assert not world.shares_process


@pytest.mark.parametrize(
    ("numbers", "shares"),
    [
        pytest.param({"world_size": 4, "process_count": 4}, False, id="processes"),
        pytest.param({"world_size": 4, "local_world_size": 4}, True, id="threads"),
        pytest.param({"world_size": 8, "local_world_size": 8, "process_count": 4}, True, id="v3-8"),
        pytest.param(
            {"world_size": 2048, "ordinal": 2047, "host_count": 256, "process_count": 1024}, True, id="pod"
        ),
    ],
)
def test_replicas_share_a_process_if_there_are_fewer_processes(numbers: dict[str, int], shares: bool) -> None:
    assert World(**numbers).shares_process is shares


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        pytest.param({"ordinal": 1}, "ordinal=1 is not in 0 <= ordinal < world_size=1", id="ordinal-high"),
        pytest.param(
            {"ordinal": -1}, "ordinal=-1 is not in 0 <= ordinal < world_size=1", id="ordinal-negative"
        ),
        pytest.param({"world_size": 0}, "ordinal=0 is not in 0 <= ordinal < world_size=0", id="no-replica"),
        pytest.param(
            {"world_size": 2, "local_ordinal": 1},
            "local_ordinal=1 is not in 0 <= local_ordinal < local_world_size=1",
            id="local-ordinal",
        ),
        pytest.param(
            {"process_index": 1},
            "process_index=1 is not in 0 <= process_index < process_count=1",
            id="process",
        ),
        pytest.param({"host_index": 2}, "host_index=2 is not in 0 <= host_index < host_count=1", id="host"),
        pytest.param(
            {"local_world_size": 2},
            "local_world_size=2 is not in 1 <= local_world_size <= world_size=1",
            id="local",
        ),
        pytest.param(
            {"process_count": 2},
            "process_count=2 is not in 1 <= process_count <= world_size=1",
            id="processes",
        ),
        pytest.param(
            {"world_size": 2, "host_count": 2},
            "host_count=2 is not in 1 <= host_count <= process_count=1",
            id="hosts",
        ),
        pytest.param({"world_size": True}, "world_size=True is not an integer", id="bool"),
        pytest.param({"ordinal": 0.0}, "ordinal=0.0 is not an integer", id="float"),
        pytest.param({"host_index": "0"}, "host_index='0' is not an integer", id="text"),
    ],
)
def test_impossible_numbers_are_refused(numbers: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        World(**numbers)
    assert str(caught.value) == text
