"""torch_xla with an engine, in real programs: lists of tensors, several processes, the compilation cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings

Printed = Callable[..., list[list[str]]]
Run = Callable[..., list[subprocess.CompletedProcess[str]]]


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "processes"), [(1, 1), (2, 1), (4, 1), (4, 4)])
def test_collectives_of_lists_groups_and_dtypes(printed: Printed, replicas: int, processes: int) -> None:
    found = printed("collectives_of_lists.py", replicas=replicas, processes=processes)
    assert found == [[" ".join(["right"] * (replicas // processes))]] * processes


@pytest.mark.slow
def test_four_processes_compile_one_program_once(printed: Printed) -> None:
    found = printed("four_processes.py", replicas=4, processes=4)
    mine, asked, weights = zip(*[lines[0].split() for lines in found], strict=True)
    assert len(set(weights)) == 1, found
    assert len(set(asked)) == 1, found
    # As many as one process would compile alone.
    assert sum(map(int, mine)) == int(asked[0]), found


def test_numpys_generator_stays_as_the_program_seeded_it() -> None:
    # A cold process: the client's start imports jax, which draws from the generator.
    code = """
import sys, numpy, torch, torch_xla
assert "jax" not in sys.modules
numpy.random.seed(7)
torch.ones(1, device="xla").cpu()
assert "jax" in sys.modules
print(numpy.random.rand())
"""
    environ = os.environ | {"PJRT_DEVICE": "CPU_POLYXLA"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == np.random.RandomState(7).rand()


def test_the_engine_can_load_a_program_that_torch_xla_cached(printed: Printed, tmp_path: Path) -> None:
    """torch_xla 2.9.0 itself cannot load programs of a plugin.

    Source: https://github.com/pytorch/xla/issues/9094 (it calls a function that plugins do not have).
    """
    assert printed("torch_xla_cache.py", str(tmp_path)) == [["2.0 1"]]
    (cached,) = [path for path in tmp_path.iterdir() if not path.name.startswith("polyxla-")]
    engine = JaxEngine(BridgeSettings())
    try:
        executable = engine.deserialize(cached.read_bytes())
        assert (2, 2) in [output.dims for output in executable.outputs]
        assert engine.compiles == 0
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("directory", ["shared", "of-{process}"])
@pytest.mark.parametrize(("replicas", "processes"), [(1, 1), (2, 1), (2, 2)])
def test_the_next_job_compiles_nothing(
    run: Run, tmp_path: Path, replicas: int, processes: int, directory: str
) -> None:
    before, after = (
        run("cached_job.py", str(tmp_path / directory), replicas=replicas, processes=processes)
        for _ in range(2)
    )
    # Only the warning of torch_xla's own attempt to load.
    lines = [line for process in (*before, *after) for line in process.stderr.splitlines()]
    assert [line for line in lines if "Failed to deserialize executable" not in line] == []
    (first, second) = ([process.stdout.splitlines() for process in job] for job in (before, after))
    assert [printed[0] for printed in first] == [printed[0] for printed in second]
    counts = [[tuple(map(int, process[1].split())) for process in job] for job in (first, second)]
    of_each = [sum(len(name) == 64 for name in printed[0].split()) for printed in first]
    programs = len({name for printed in first for name in printed[0].split() if len(name) == 64})
    assert [sum(compiles for compiles, _, _ in job) for job in counts] == [programs, 0]
    # Each process counts the programs that it needs, whichever process compiles or loads them.
    assert [count_row[1:] for count_row in counts[0]] == [(0, count) for count in of_each]
    assert [count_row[1:] for count_row in counts[1]] == [(count, 0) for count in of_each]


def test_memory_counters_equal_the_size_of_tensors(printed: Printed) -> None:
    (lines,) = printed("memory_info.py")
    assert lines == [f"{8 << 20} True", "0"]


@pytest.mark.long
def test_training_takes_no_more_memory_with_every_step(printed: Printed) -> None:
    (lines,) = printed("long_training.py")
    (live, in_use, resident), (live_after, in_use_after, resident_after) = (
        map(int, line.split()) for line in lines
    )
    assert (live_after, in_use_after) == (live, in_use)
    assert resident_after - resident < 16 << 20
