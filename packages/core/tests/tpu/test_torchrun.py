"""What counts as a process that torchrun has started."""

from __future__ import annotations

from polyxla.tpu import env, torchrun


def test_without_torchrun_its_other_variables_do_not_count() -> None:
    assert torchrun.process_count({env.WORLD_SIZE: "4", env.RANK: "0"}) is None
