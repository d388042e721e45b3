"""`polyxla pod run` with everything behind it: two hosts of an emulated pod, started by one command.

A stand-in for ssh runs the hosts' programs on this machine; packages/pod tests with a real OpenSSH server.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from polyxla.plugin import free_addresses
from polyxla_testing import RuntimeUnderTest

pytestmark = pytest.mark.emulated_tpu

PROGRAMS = Path(__file__).parent / "programs"
FAILING = str(PROGRAMS / "failing_on_one_host.py")
TIMEOUT_S = 280
STAND_IN = '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n'

RunPod = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_pod(runtime: RuntimeUnderTest, clean_environ: dict[str, str], tmp_path: Path) -> RunPod:
    """Runs a command on the two hosts of an emulated v4-16."""
    (tmp_path / "ssh").write_text(STAND_IN)
    (tmp_path / "ssh").chmod(0o755)
    environ = {
        **clean_environ,
        "PATH": f"{tmp_path}:{clean_environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path),
    }

    def run(*command: str, variables: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
        how = ["--hosts", ",".join(free_addresses(2)), "--python", sys.executable, "--connect-timeout", "60"]
        how += ["--runtime", runtime.name, "--env", "POLYXLA_EMULATE=v4-16", "--directory", str(tmp_path)]
        how += [f"--env={name}={value}" for name, value in variables.items()]
        return subprocess.run(
            [sys.executable, "-m", "polyxla", "pod", "run", *how, "--", sys.executable, *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    return run


@pytest.mark.slow
def test_one_command_trains_on_all_hosts_of_a_pod(run_pod: RunPod) -> None:
    done = run_pod("-m", "polyxla_examples.digits")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\[(w\d)\] .*world_size 8 .* test_accuracy ([\d.]+) ", done.stdout, re.MULTILINE)
    assert sorted(host for host, _ in found) == ["w0", "w1"]
    assert all(float(accuracy) >= 0.95 for _, accuracy in found)


@pytest.mark.long
def test_the_replica_that_raises_explains_the_end_of_both_hosts(run_pod: RunPod) -> None:
    done = run_pod(FAILING, "raise")
    assert done.returncode == 1
    assert "polyxla: error: w1 (" in done.stderr
    errors = re.findall(r"^\[(w\d)\] (?:[\w.]+\.)?(\w+Error): ", done.stderr, re.MULTILINE)
    assert errors[-1:] == [("w1", "ValueError")]
    assert "ReplicaLostError" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "account"),
    [
        pytest.param(
            "kill",
            r"process \d \(replica 7; pid \d+\) was ended by SIGKILL",
            marks=pytest.mark.long,
            id="kill",
        ),
        # Two watch: the bridge, and the launch for all hosts. On a slow machine, the second may be first.
        pytest.param(
            "return",
            r"replica 7 returned[^;]*; .*waits? .*at \S*failing_on_one_host.py:23|"
            r"replicas 0-6 wait at \S*failing_on_one_host.py:23; replica 7 on host 1 \([\d.]+\) returned",
            id="return",
        ),
        pytest.param(
            "hang",
            r"replicas 0-6 wait at \S*failing_on_one_host.py:23; "
            r"replica 7 on host 1 \([\d.]+\) is at \S*failing_on_one_host.py:31, with no work for the device",
            marks=pytest.mark.long,
            id="hang",
        ),
    ],
)
def test_the_launcher_says_which_replica_of_which_host_the_others_wait_for(
    run_pod: RunPod, how: str, account: str
) -> None:
    done = run_pod(FAILING, how, variables={"POLYXLA_STALL_TIMEOUT_S": "12"})
    assert done.returncode == 1
    # On a slow machine, the other host has time to print its own, too.
    first, *_ = re.findall(r"^\[w\d\] polyxla\.errors\.\w+Error: (.*)", done.stderr, re.MULTILINE)
    assert re.search(account, first), first


@pytest.mark.long
def test_hosts_that_share_the_directory_of_the_checkpoints_train_and_others_do_not(
    run_pod: RunPod, tmp_path: Path
) -> None:
    program = str(PROGRAMS / "train_in_directory_of_host.py")
    done = run_pod(program, str(tmp_path / "shared"))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["step-00000002.safetensors"]
    done = run_pod(program, str(tmp_path / "own{host}"))
    assert done.returncode != 0
    assert re.search(r"UsageError: host 1 \(.+\) did not see within 35 s the file that host 0 ", done.stderr)
    assert "the hosts do not share the directory (from checkpoint_dir=" in done.stderr
    assert list((tmp_path / "own0").iterdir()) == []
    assert not (tmp_path / "own1").exists()
