"""The compilation cache is on by default: the next job uses it, a different job does not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# The bridge's tests cover the same cache in seconds; these are whole jobs.
pytestmark = [pytest.mark.pjrt, pytest.mark.long]

TIMEOUT_S = 200
PROGRAMS = Path(__file__).parent / "programs"
JOB, TRAINING = PROGRAMS / "count_cache_hits.py", PROGRAMS / "train_on_two.py"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, clean_environ: dict[str, str]) -> Run:
    """Return a function that runs a script under plain python, with an empty home directory."""
    home = {name: value for name, value in clean_environ.items() if name != "POLYXLA_COMPILE_CACHE"}
    home |= {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": "", "PJRT_DEVICE": "CPU"}

    def run(script: Path, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, str(script), *map(str, arguments)],
            env=home | environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    return run


def counted(done: subprocess.CompletedProcess[str]) -> list[tuple[int, int]]:
    """Return each process's hits and misses; check that all processes got the same result."""
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len({row[0] for row in rows}) == 1, done.stdout
    assert {row[3] for row in rows} == {"0"}, "torch_xla's own cache is not used"
    return [(int(hits), int(misses)) for _, hits, misses, _ in rows]


def cached(directory: Path) -> list[Path]:
    return sorted(directory.glob("polyxla-*")) if directory.is_dir() else []


def test_the_next_job_compiles_nothing_and_a_different_job_compiles_its_own(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "home/.cache/polyxla/programs"
    first, second = run(JOB, 2), run(JOB, 2)
    [(hits, misses), same] = counted(first)
    assert (hits, misses) == same == (0, len(cached(directory)))
    assert misses > 0
    assert counted(second) == [(misses, 0)] * 2
    assert first.stdout.split()[0] == second.stdout.split()[0]
    assert counted(run(JOB, 3)) == [(0, misses)] * 3, "another world size has other programs"
    flags = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
    assert counted(run(JOB, 2, **flags)) == [(0, misses)] * 2, "other flags have other programs"
    assert len(cached(directory)) == 3 * misses


def test_threads_of_one_process_share_the_cache_on_an_emulated_tpu(run: Run, tmp_path: Path) -> None:
    emulated = {"POLYXLA_EMULATE": "v3-8", "PJRT_DEVICE": "", "POLYXLA_COMPILE_CACHE": str(tmp_path / "mine")}
    first, second = (run(JOB, 2, **emulated) for _ in range(2))
    assert cached(tmp_path / "mine")
    assert not (tmp_path / "home/.cache/polyxla").exists()
    # The counters belong to the process, and one thread may read them before the other has used the cache.
    assert {hits for hits, _ in counted(first)} == {0} == {misses for _, misses in counted(second)}
    assert all(hits > 0 for hits, _ in counted(second))


def test_the_cache_can_be_switched_off(run: Run, tmp_path: Path) -> None:
    assert counted(run(JOB, 2, POLYXLA_COMPILE_CACHE="off")) == [(0, 0)] * 2
    assert not (tmp_path / "home/.cache/polyxla").exists()


def test_a_home_that_is_not_writable_prints_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(JOB, 2, HOME=str(tmp_path / "file"))
    assert counted(done) == [(0, 0)] * 2
    printed = [line for line in done.stderr.splitlines() if "no compiled programs are cached" in line]
    assert len(printed) == 1
    assert "POLYXLA_COMPILE_CACHE=DIRECTORY" in printed[0]


def test_a_training_prints_hits_and_misses_once(run: Run) -> None:
    counts = r"(\d+) programs compiled .*program cache: (\d+) hits, (\d+) misses"
    lines = [re.findall(counts, run(TRAINING).stderr) for _ in range(2)]
    [(compiled, hits, misses)], [again] = lines
    # A program that was loaded counts as compiled, in the short time that this took.
    assert (hits, again) == ("0", (compiled, misses, "0"))
    assert int(misses) > 0
