"""Several replicas on one machine: the conformance suite, and plain torch_xla scripts."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyxla import Replica
from polyxla_testing import RuntimeConformance, RuntimeUnderTest

SEEDS = Path(__file__).parent / "seeds"
PROGRAMS = Path(__file__).parent / "programs"


class TestReplicas(RuntimeConformance):
    devices = 4


@pytest.mark.torch_xla("a program for torch_xla")
@pytest.mark.parametrize(
    ("count", "processes"),
    [
        pytest.param(2, 2, marks=pytest.mark.long),
        pytest.param(4, 4, marks=pytest.mark.long),
        pytest.param(8, 8, marks=pytest.mark.long),
        pytest.param(2, 1, marks=pytest.mark.long),
        pytest.param(4, 1, marks=pytest.mark.long),
        pytest.param(8, 1, marks=pytest.mark.long),
        pytest.param(4, 2, marks=pytest.mark.long),
    ],
)
def test_the_sum_has_every_ordinal(
    runtime: RuntimeUnderTest, require_layout: Callable[[int, int], None], count: int, processes: int
) -> None:
    require_layout(count, processes)
    layout = {"POLYXLA_PJRT_PROCESSES": str(processes)}
    done = runtime.run("--devices", str(count), str(SEEDS / "all_reduce.py"), **layout)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"ordinal (\d+) of (\d+) sum ([\d.]+)", done.stdout)
    assert sorted(found) == [(str(i), str(count), f"{count * (count - 1) / 2}") for i in range(count)]


@pytest.mark.torch_xla("a program for torch_xla")
def test_a_loader_in_a_thread_belongs_to_its_replica(
    runtime: RuntimeUnderTest, require_layout: Callable[[int, int], None]
) -> None:
    require_layout(2, 1)
    program = str(PROGRAMS / "streams_in_threads.py")
    done = runtime.run("--devices", "2", program, POLYXLA_PJRT_PROCESSES="1")
    assert done.returncode == 0, done.stderr
    fix = "Leave full_graph out, or run each replica in a process of its own."
    halves = ([0.0, 2.0, 4.0, 6.0], [1.0, 3.0, 5.0, 7.0])
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == [([half] * 4, fix) for half in halves]


def _leave_first(replica: Replica) -> bool:
    with torch.serialization.safe_globals([Path]):
        replica.barrier("both are in the block")
        if replica.is_first:
            replica.barrier("the other has left")
            return Path in torch.serialization.get_safe_globals()
    replica.barrier("the other has left")
    return True


@pytest.mark.torch_xla("its replicas may be threads")
@pytest.mark.parametrize("everywhere", [(2, 1)], indirect=True)
def test_what_a_replica_may_load_is_not_taken_from_it_by_another(
    everywhere: Callable[..., list[Any]],
) -> None:
    assert everywhere(_leave_first) == [True, True]
    assert Path not in torch.serialization.get_safe_globals()


@pytest.mark.slow
@pytest.mark.torch_xla("a program for torch_xla")
def test_multi_device_mnist_runs_unmodified(runtime: RuntimeUnderTest) -> None:
    done = runtime.run("--devices", "4", str(SEEDS / "mnist_multi.py"), "5120")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"ordinal (\d) steps (\d+) first ([\d.]+) last ([\d.]+)", done.stdout)
    assert sorted(line[0] for line in lines) == ["0", "1", "2", "3"]
    # Threads of a process share one generator, so each starts with different weights, as on a TPU.
    assert all(steps == "10" and float(last) < float(first) for _, steps, first, last in lines)


@pytest.mark.long
def test_digits_trains_on_four_replicas(runtime: RuntimeUnderTest) -> None:
    done = runtime.run("--devices", "4", "-m", "polyxla_examples.digits", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["world_size"], result["runtime"]) == (4, runtime.name)
    # 1437 images: 360 for each replica with repeats, in batches of 32 without the last incomplete one.
    assert result["steps"] == result["epochs"] * 11
    assert result["test_accuracy"] >= 0.97
