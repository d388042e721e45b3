"""Torch's threads in the processes of a launch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyxla.plugin import share_cores

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def plan_of(processes: int) -> Any:
    return SimpleNamespace(processes_here=range(processes))


@pytest.mark.parametrize(
    ("processes", "environ", "threads"),
    [
        (CORES, {}, 1),
        (2 * CORES, {}, 1),
        (1, {}, CORES + 1),
        (2 * CORES, {"OMP_NUM_THREADS": str(CORES + 1)}, CORES + 1),
        (2 * CORES, {"MKL_NUM_THREADS": str(CORES + 1)}, CORES + 1),
    ],
)
def test_a_process_has_its_share_unless_the_user_has_chosen(
    processes: int, environ: dict[str, str], threads: int
) -> None:
    torch.set_num_threads(CORES + 1)
    share_cores(plan_of(processes), environ)
    # One process on one core is both cases.
    assert torch.get_num_threads() == (threads if processes > 1 else CORES + 1)


def test_a_lower_number_that_the_program_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    torch.set_num_threads(1)
    share_cores(plan_of(2), {})
    assert torch.get_num_threads() == 1
