"""No silent hang: every way in which replicas can fail each other ends, and says who, where and why."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyxla import Replica, ReplicaLostError, StalledError
from polyxla.testing import RuntimeUnderTest

PATIENCE_S = 120.0
LAYOUTS = [
    pytest.param((2, 1), id="threads", marks=pytest.mark.long),
    pytest.param((2, 2), id="processes"),
]
everywhere = pytest.mark.parametrize("everywhere", LAYOUTS, indirect=True)


def _fail_on_one(replica: Replica) -> None:
    if replica.ordinal == 1:
        raise ValueError("only ordinal 1")
    replica.barrier()


@everywhere
def test_one_that_raises_ends_the_others(everywhere: Callable[..., list[Any]]) -> None:
    with pytest.raises(ValueError, match="only ordinal 1") as caught:
        everywhere(_fail_on_one)
    assert any("ordinal 1 on " in note for note in caught.value.__notes__)
    assert "in _fail_on_one" in str(caught.value.__cause__)


def _die_on_one(replica: Replica) -> None:
    replica.barrier()
    if replica.ordinal == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    replica.barrier()


@everywhere
def test_one_that_is_killed_is_named(
    request: pytest.FixtureRequest, everywhere: Callable[..., list[Any]]
) -> None:
    with pytest.raises(ReplicaLostError) as caught:
        everywhere(_die_on_one)
    found = re.match(
        r"process (\d) \(pid \d+\) was ended by SIGKILL .*; its peak was ([\d,]+) MiB", str(caught.value)
    )
    assert found, str(caught.value)
    (_, processes) = request.node.callspec.params["everywhere"]
    assert int(found[1]) == processes - 1
    # torch_xla alone is some 400 MiB.
    assert 100 < int(found[2].replace(",", "")) < 20_000


def _be_late_on_one(replica: Replica) -> None:
    if replica.ordinal == 1:
        time.sleep(10 * PATIENCE_S)
    replica.barrier("a tag of its own")


@everywhere
def test_one_that_never_comes_is_shown_where_it_is(
    everywhere: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYXLA_STALL_TIMEOUT_S", "3")
    with pytest.raises(StalledError, match=r"waited too long for other replicas: .*replica 0: in "):
        everywhere(_be_late_on_one)
    shown = capfd.readouterr().err
    assert re.search(r"replica 1: idle for [\d.]+ s", shown)
    # Where both are, to the line.
    assert re.search(r'test_failures.py", line \d+, in _be_late_on_one\n +time.sleep', shown)
    assert re.search(r'test_failures.py", line \d+, in _be_late_on_one\n +replica.barrier', shown)


HANGING = """
import time
import polyxla
import torch
from torch.utils.data import DataLoader, Dataset

class Hanging(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            time.sleep(1000)
        return torch.zeros(index)

def train(replica, workers):
    # torch_xla copies as many batches at once, and waits for them.
    prefetch = {"device_prefetch_size": 1}
    for batch in replica.loader(DataLoader(Hanging(), num_workers=workers), prefetch=prefetch):
        print("batch", len(batch[0]), flush=True)

if __name__ == "__main__":
    polyxla.launch(train, ({workers},))
"""


@pytest.mark.parametrize(
    ("workers", "account"),
    [
        pytest.param(0, r"the loader is at .*hanging\.py:13", id="read-here"),
        pytest.param(
            1,
            r"it waits for the loader's workers \(processes \d+\)",
            id="read-in-a-worker",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_dataset_that_hangs_is_an_error_with_its_line(
    runtime: RuntimeUnderTest, tmp_path: Path, workers: int, account: str
) -> None:
    script = tmp_path / "hanging.py"
    script.write_text(HANGING.replace("{workers}", str(workers)))
    done = runtime.run("--devices", "1", str(script), POLYXLA_INPUT_TIMEOUT_S="12")
    assert done.returncode == 1, done.stderr
    assert re.search(rf"^polyxla: no batch for \d+ s: {account}. After 12 s", done.stderr, re.MULTILINE)
    assert re.search(
        rf"no batch arrived in 12 s: {account}. POLYXLA_INPUT_TIMEOUT_S sets the limit.$",
        done.stderr,
        re.MULTILINE,
    )
    assert done.stdout.splitlines() == [f"batch {number}" for number in range(5)]


TOUCH = """
import torch_xla
device = torch_xla.device()
def train(index):
    print("never")
if __name__ == "__main__":
    torch_xla.launch(train)
"""


def test_a_device_touched_before_the_launch_is_refused_with_its_line(
    runtime: RuntimeUnderTest, tmp_path: Path
) -> None:
    script = tmp_path / "touch.py"
    script.write_text(TOUCH)
    done = runtime.run("--devices", "2", str(script))
    assert done.returncode == 2
    assert f"it was first touched at {script}:3 (from torch_xla.launch)" in done.stderr
    assert "never" not in done.stdout


NO_GUARD = """
import torch_xla
def train(index):
    print("never")
torch_xla.launch(train)
"""


def test_a_script_without_a_main_guard_does_not_launch_without_end(
    runtime: RuntimeUnderTest, tmp_path: Path
) -> None:
    script = tmp_path / "no_guard.py"
    script.write_text(NO_GUARD)
    done = runtime.run("--devices", "2", str(script))
    assert done.returncode == 2
    assert "Put the launch under: if __name__ == '__main__':" in done.stderr


WAIT = """
import sys, time, pathlib, polyxla

def train(replica, folder):
    replica.barrier()
    pathlib.Path(folder, str(replica.ordinal)).touch()
    if replica.ordinal == 1:
        time.sleep(1000)
    replica.barrier()

if __name__ == "__main__":
    polyxla.launch(train, (sys.argv[1],))
"""


def _session(leader: int) -> list[int]:
    """Return the living processes of a session, by number."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed-parent"])
def test_the_end_of_the_parent_ends_everything(
    runtime: RuntimeUnderTest, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "wait.py").write_text(WAIT)
    command = [sys.executable, "-m", "polyxla", "run", "--devices", "2", "wait.py", str(tmp_path)]
    environ = {**os.environ, "POLYXLA_RUNTIME": runtime.name}
    with (tmp_path / "out").open("w") as out:
        parent = subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdout=out, stderr=out, start_new_session=True
        )
    deadline = time.monotonic() + PATIENCE_S
    while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
        assert time.monotonic() < deadline, (tmp_path / "out").read_text()
        time.sleep(0.05)
    if number == signal.SIGINT:
        # As a terminal does: to every process of the group.
        os.killpg(parent.pid, number)
    else:
        parent.kill()
    assert parent.wait(PATIENCE_S) != 0
    while left := _session(parent.pid):
        assert time.monotonic() < deadline, f"{left} still live"
        time.sleep(0.05)
