"""No silent hangs: every failure of a replica ends the job with an error that says who, where and why."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polyxla import DisagreementError, Replica, ReplicaLostError, StalledError
from polyxla_testing import RuntimeUnderTest

PATIENCE_S = 120.0
PROGRAMS = Path(__file__).parent / "programs"
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
def test_an_exception_in_one_replica_ends_the_others(everywhere: Callable[..., list[Any]]) -> None:
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
def test_a_killed_replica_is_named_with_its_signal(
    request: pytest.FixtureRequest, everywhere: Callable[..., list[Any]]
) -> None:
    with pytest.raises(ReplicaLostError) as caught:
        everywhere(_die_on_one)
    found = re.match(
        r"process (\d) \(replicas? ([\d, ]+); pid \d+\) was ended by SIGKILL .*; its peak was ([\d,]+) MiB",
        str(caught.value),
    )
    assert found, str(caught.value)
    (_, processes) = request.node.callspec.params["everywhere"]
    assert (int(found[1]), found[2]) == (processes - 1, "0, 1" if processes == 1 else "1")
    # torch_xla alone takes about 400 MiB.
    assert 100 < int(found[3].replace(",", "")) < 20_000


def _be_late_on_one(replica: Replica) -> None:
    if replica.ordinal == 1:
        time.sleep(10 * PATIENCE_S)
    replica.barrier("tag")


@pytest.mark.slow
@everywhere
def test_a_replica_that_never_arrives_is_shown_with_its_stack(
    everywhere: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYXLA_STALL_TIMEOUT_S", "3")
    with pytest.raises(StalledError, match=r"waited too long for other replicas: .*replica 0: in "):
        everywhere(_be_late_on_one)
    stderr = capfd.readouterr().err
    assert re.search(r"replica 1: idle for [\d.]+ s", stderr)
    # The stacks of both replicas, with line numbers.
    assert re.search(r'test_failures.py", line \d+, in _be_late_on_one\n +time.sleep', stderr)
    assert re.search(r'test_failures.py", line \d+, in _be_late_on_one\n +replica.barrier', stderr)


def _take_unequal_steps(replica: Replica, folder: Path) -> None:
    import torch

    module = replica.setup(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3 if replica.ordinal == 0 else 9):
        optimizer.zero_grad()
        loss = module(torch.ones(2, device=replica.device)).sum()
        loss.backward()
        replica.step(optimizer)
        loss.item()
    (folder / f"{replica.ordinal}").write_text(str(time.time()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "everywhere",
    [*LAYOUTS, pytest.param((4, 2), id="mixed", marks=pytest.mark.long)],
    indirect=True,
)
def test_replicas_with_more_steps_than_another_are_named_soon(
    request: pytest.FixtureRequest,
    everywhere: Callable[..., list[Any]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(StalledError) as caught:
        everywhere(_take_unequal_steps, tmp_path)
    assert time.time() - float((tmp_path / "0").read_text()) < 15
    text = str(caught.value)
    assert text.startswith("replica 0 returned after 3 steps; "), text
    # Any of the others may be the first to report.
    line = _take_unequal_steps.__code__.co_firstlineno + 10
    assert re.search(rf"(waits?|is|are) in step 4 at \S*test_failures.py:{line}[.;]", text), text
    assert "All replicas must take part in each step" in text
    stderr = capfd.readouterr().err
    assert "@ " not in stderr, stderr
    assert "Fatal" not in stderr, stderr


@pytest.mark.pjrt
@pytest.mark.long
def test_a_plain_program_with_unequal_steps_prints_one_line(runtime: RuntimeUnderTest) -> None:
    script = PROGRAMS / "unequal_steps.py"
    done = runtime.run("--devices", "2", str(script))
    assert done.returncode == 1
    assert re.fullmatch(
        r"(?:polyxla: runtime .*\n)?"
        r"polyxla: error: replica 1 returned; replica 0 waits at \S*unequal_steps.py:19\. All replicas .*\n"
        rf"  at {script}:\d+\n",
        done.stderr,
    ), done.stderr


def _disagree(replica: Replica) -> None:
    import torch

    replica.all_reduce(torch.ones(2, 3, device=replica.device), "sum" if replica.ordinal else "max").cpu()


@everywhere
def test_replicas_that_disagree_end_with_both_calls_and_lines(everywhere: Callable[..., list[Any]]) -> None:
    with pytest.raises(DisagreementError) as caught:
        everywhere(_disagree)
    line = _disagree.__code__.co_firstlineno + 3
    assert re.search(
        r"replica 0 calls all-reduce \(max\S*\) of float32\[\S*\] and replica 1 all-reduce \(add\) of "
        rf"float32\[\S*\]\. .*replica 0 is at \S*test_failures.py:{line}; "
        rf"replica 1 is at \S*test_failures.py:{line}",
        str(caught.value),
    )


DISAGREEMENTS = {
    "operator": r"replica 0 calls all-reduce \(maximum\) of float32\[2,3\] and replica 1 all-reduce \(add\) "
    r"of float32\[2,3\]\. .*\(replica 0 is at \S*disagree.py:14; replica 1 is at \S*disagree.py:14\)",
    "shape": r"replica 0 calls all-gather of float32\[2,3\] along dimension 0 and replica 1 all-gather of "
    r"float32\[3,3\] along dimension 0\. .*disagree.py:16; .*disagree.py:16",
    "branch": r"replicas have gradients of different parameters, such as parameter 0 of SGD, of shape "
    r"\(1, 2\): .*disagree.py:26",
}
WARNINGS = {
    "seed": r"disagree.py:26: replicas begin with different parameters, such as parameter 0 of SGD, .*seed",
    "same": "",
}


@pytest.mark.pjrt
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.long) for kind in ("operator", "shape")), "branch"]
)
def test_a_plain_program_whose_replicas_disagree_ends(runtime: RuntimeUnderTest, kind: str) -> None:
    done = runtime.run("--devices", "2", str(PROGRAMS / "disagree.py"), kind)
    assert done.returncode
    assert re.search(DISAGREEMENTS[kind], done.stderr), done.stderr
    assert "gloo" not in done.stderr


@pytest.mark.pjrt
@pytest.mark.parametrize("kind", ["seed", pytest.param("same", marks=pytest.mark.long)])
def test_a_plain_program_that_trains_replicas_apart_is_warned(runtime: RuntimeUnderTest, kind: str) -> None:
    done = runtime.run("--devices", "2", str(PROGRAMS / "disagree.py"), kind)
    assert done.returncode == 0, done.stderr
    assert re.search(WARNINGS[kind], done.stderr), done.stderr
    assert done.stderr.count("disagree.py") == bool(WARNINGS[kind]), done.stderr


def _work_alone_at_the_end(replica: Replica) -> float:
    import torch

    replica.barrier()
    if replica.ordinal == 1:
        # Longer than another may wait for one that has returned: first on the host, then on the device.
        time.sleep(8)
        matrix = torch.eye(500, device=replica.device)
        end = time.monotonic() + 8
        while time.monotonic() < end:
            for _ in range(20):
                matrix = matrix @ matrix
            replica.sync(wait=True)
        return float(matrix.sum())
    return 0.0


@pytest.mark.long
@everywhere
def test_a_replica_that_others_do_not_wait_for_may_work_on(everywhere: Callable[..., list[Any]]) -> None:
    assert everywhere(_work_alone_at_the_end) == [0.0, 500.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "account"),
    [
        pytest.param(0, r"the loader is at .*hanging_dataset\.py:18", id="read-here"),
        pytest.param(
            1,
            r"it waits for the loader's workers \(processes \d+\)",
            id="read-in-a-worker",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_hanging_dataset_is_an_error_with_its_line(
    runtime: RuntimeUnderTest, workers: int, account: str
) -> None:
    script = PROGRAMS / "hanging_dataset.py"
    done = runtime.run("--devices", "1", str(script), str(workers), POLYXLA_INPUT_TIMEOUT_S="6")
    assert done.returncode == 1, done.stderr
    assert re.search(rf"^polyxla: no batch for \d+ s: {account}. After 6 s", done.stderr, re.MULTILINE)
    assert re.search(
        rf"no batch arrived in 6 s: {account}. POLYXLA_INPUT_TIMEOUT_S sets the limit.$",
        done.stderr,
        re.MULTILINE,
    )
    assert done.stdout.splitlines() == [f"batch {number}" for number in range(5)]


@pytest.mark.torch_xla("a program for torch_xla")
def test_a_device_touched_before_the_launch_is_refused_with_its_line(runtime: RuntimeUnderTest) -> None:
    script = PROGRAMS / "touch_device.py"
    # On pjrt. A TPU node has several devices anyway.
    done = runtime.run(str(script), CPU_NUM_DEVICES="2")
    assert done.returncode == 2
    assert f"{script.name}:6 (from torch_xla.launch). Use devices only in" in done.stderr
    assert "never" not in done.stdout


@pytest.mark.torch_xla("a program for torch_xla")
def test_a_script_without_a_main_guard_does_not_launch_forever(runtime: RuntimeUnderTest) -> None:
    done = runtime.run("--devices", "2", str(PROGRAMS / "no_main_guard.py"))
    assert done.returncode == 2
    assert "Put the launch under: if __name__ == '__main__':" in done.stderr


def _of_job(mark: str) -> list[int]:
    """Return the ids of the living processes that were started with an environment variable."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def _job(
    runtime: RuntimeUnderTest, program: str, directory: Path, devices: int = 2, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until each replica has written its file; end what is left of it afterwards."""
    script, count = str(PROGRAMS / program), str(devices)
    command = [sys.executable, "-m", "polyxla", "run", "--devices", count, *options, script, str(directory)]
    environ = {**os.environ, "POLYXLA_RUNTIME": runtime.name, "TEST_JOB": str(directory)}
    with (directory / "out").open("w") as out:
        parent = subprocess.Popen(
            command, cwd=directory, env=environ, stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not all((directory / str(ordinal)).exists() for ordinal in range(devices)):
            assert time.monotonic() < deadline, (directory / "out").read_text()
            time.sleep(0.05)
        yield parent
    finally:
        for pid in _of_job(f"TEST_JOB={directory}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("number", "program"),
    [
        pytest.param(signal.SIGINT, "wait_for_each_other.py", id="ctrl-c"),
        pytest.param(signal.SIGKILL, "wait_for_each_other.py", id="killed-parent"),
        pytest.param(signal.SIGKILL, "hold_gil.py", id="stuck-replicas", marks=pytest.mark.pjrt),
    ],
)
def test_the_end_of_the_parent_ends_all_its_processes(
    runtime: RuntimeUnderTest, tmp_path: Path, number: signal.Signals, program: str
) -> None:
    with _job(runtime, program, tmp_path) as parent:
        if number == signal.SIGINT:
            # A terminal sends the signal to all processes of the group.
            os.killpg(parent.pid, number)
        else:
            parent.kill()
        assert parent.wait(PATIENCE_S) == (130 if number == signal.SIGINT else -number)
        if number == signal.SIGINT:
            assert (tmp_path / "out").read_text().splitlines()[-1] == "polyxla: interrupted"
        deadline = time.monotonic() + PATIENCE_S
        while left := _of_job(f"TEST_JOB={tmp_path}"):
            assert time.monotonic() < deadline, f"{left} still live"
            time.sleep(0.05)


@pytest.mark.pjrt
@pytest.mark.parametrize(("devices", "options"), [(1, []), (2, []), (2, ["--each"])])
def test_ctrl_c_saves_a_training_before_it_ends(
    runtime: RuntimeUnderTest, tmp_path: Path, devices: int, options: list[str]
) -> None:
    with _job(runtime, "train_until_interrupted.py", tmp_path, devices, *options) as parent:
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.wait(PATIENCE_S) == 130
    said = (tmp_path / "out").read_text()
    saves = "polyxla: training ends after this step, and saves it; press Ctrl-C again to end at once\n"
    assert said.count(saves) == 1
    assert re.search(r"^polyxla: ended by SIGINT after step \d+, which is saved$", said, re.MULTILINE)
    assert said.endswith("\npolyxla: interrupted\n")
    assert len(list((tmp_path / "saved").glob("step-*.safetensors"))) == 1
    assert all((tmp_path / f"ended-{ordinal}").exists() for ordinal in range(devices))
