"""Compiled programs are kept by default: the next job takes them, another kind of job does not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# The bridge's own tests go through the same cache in seconds; these are whole jobs.
pytestmark = [pytest.mark.pjrt, pytest.mark.long]

TIMEOUT_S = 200
JOB = """
import sys
import polyxla

def work(replica):
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    # As data: a number would be part of the program.
    x = (torch.arange(6.0).reshape(2, 3) + replica.ordinal).to(replica.device)
    total = xm.all_reduce("sum", torch.softmax(x @ x.t(), 0).sum()).cpu().item()
    counts = [met.counter_value(f"polyxla.ProgramCache{name}") or 0 for name in ("Hit", "Miss")]
    return round(total, 4), *counts, met.counter_value("PersistentCacheMiss") or 0

if __name__ == "__main__":
    for found in polyxla.launch(work, devices=int(sys.argv[1])):
        print(*found)
"""
TRAINING = """
import torch
from torch import nn
from polyxla_training import Trainer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = Trainer(max_epochs=1, devices=2, log_dir=None)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(32, 4), 4))
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, clean_environ: dict[str, str]) -> Run:
    """Return what runs a program under plain python, as a person with a home of his own."""
    home = {name: value for name, value in clean_environ.items() if name != "POLYXLA_COMPILE_CACHE"}
    home |= {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": "", "PJRT_DEVICE": "CPU"}

    def run(code: str, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(code)
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
    """Return each process's hits and misses, once the results are seen to be the same everywhere."""
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len({row[0] for row in rows}) == 1, done.stdout
    assert {row[3] for row in rows} == {"0"}, "torch_xla's own cache stays as it is"
    return [(int(hits), int(misses)) for _, hits, misses, _ in rows]


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("polyxla-*")) if folder.is_dir() else []


def test_the_next_job_compiles_nothing_and_another_one_its_own(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "home/.cache/polyxla/programs"
    first, second = run(JOB, 2), run(JOB, 2)
    [(hits, misses), same] = counted(first)
    assert (hits, misses) == same == (0, len(kept(folder)))
    assert misses > 0
    assert counted(second) == [(misses, 0)] * 2
    assert first.stdout.split()[0] == second.stdout.split()[0]
    assert counted(run(JOB, 3)) == [(0, misses)] * 3, "the programs of another world size are others"
    flags = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
    assert counted(run(JOB, 2, **flags)) == [(0, misses)] * 2, "those of other flags too"
    assert len(kept(folder)) == 3 * misses


def test_threads_of_one_process_share_what_an_emulated_tpu_keeps(run: Run, tmp_path: Path) -> None:
    emulated = {"POLYXLA_EMULATE": "v3-8", "PJRT_DEVICE": "", "POLYXLA_COMPILE_CACHE": str(tmp_path / "mine")}
    first, second = (run(JOB, 2, **emulated) for _ in range(2))
    assert kept(tmp_path / "mine")
    assert not (tmp_path / "home/.cache/polyxla").exists()
    # Counters are a process's, and a thread may read before the other has asked.
    assert {hits for hits, _ in counted(first)} == {0} == {misses for _, misses in counted(second)}
    assert all(hits > 0 for hits, _ in counted(second))


def test_nothing_is_kept_for_who_wants_none(run: Run, tmp_path: Path) -> None:
    assert counted(run(JOB, 2, POLYXLA_COMPILE_CACHE="off")) == [(0, 0)] * 2
    assert not (tmp_path / "home/.cache/polyxla").exists()


def test_a_home_that_cannot_be_written_to_is_a_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(JOB, 2, HOME=str(tmp_path / "file"))
    assert counted(done) == [(0, 0)] * 2
    said = [line for line in done.stderr.splitlines() if "no compiled programs are kept" in line]
    assert len(said) == 1
    assert "POLYXLA_COMPILE_CACHE=FOLDER" in said[0]


def test_a_training_says_hits_and_misses_once(run: Run) -> None:
    lines = [re.findall(r"program cache: (\d+) hits, (\d+) misses", run(TRAINING).stderr) for _ in range(2)]
    [(hits, misses)], [again] = lines
    assert (hits, again) == ("0", (misses, "0"))
    assert int(misses) > 0
