"""`polyxla pod run --runtime xrt --workers` on two hosts in network namespaces, with real OpenSSH servers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla_pod import tpu_nodes
from polyxla_testing.processes import is_alive, wait_for_end_of, wait_until
from polyxla_testing.ssh_servers import HAS_SSH, MISSING, ssh_files, start_sshd, stop
from polyxla_xrt import env
from polyxla_xrt.config import addresses, configuration

if TYPE_CHECKING:
    from jobs.conftest import Host, Served

PATIENCE_S = 240.0
PROGRAMS = Path(__file__).parents[1] / "programs"
STEPS = str(PROGRAMS / "steps_on_pod.py")


@dataclass
class SshPod:
    """Two hosts; the launcher is in the network of the first."""

    hosts: list[Host]
    directory: Path
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        names = ",".join(host.address for host in self.hosts)
        how = ["--hosts", names, "--engine-option=-F", f"--engine-option={self.directory / 'ssh_config'}"]
        how += ["--python", sys.executable, "--runtime", "xrt", "--env", "TPU_NUM_DEVICES=2"]
        # The same directory for the processes of both hosts.
        how += ["--env", f"POD_TEST={self.directory}", "--env", "POLYXLA_COMPILE_CACHE=off"]
        command = ("-m", "polyxla", "pod", "run", *how, "--connect-timeout", "60", *arguments)
        self.launchers.append(self.hosts[0].start(*command, XDG_STATE_HOME=str(self.directory)))
        return self.launchers[-1]

    def finish(self, launcher: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        out, err = launcher.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(launcher.args, launcher.returncode, out, err)

    def processes(self) -> set[int]:
        """Return the processes that run in the hosts' networks, except the servers and the launchers."""
        ours = {launcher.pid for launcher in self.launchers}
        found = set()
        for host in self.hosts:
            listed = subprocess.run(
                ["ip", "netns", "pids", host.prefix[-1]], capture_output=True, text=True, check=True
            )
            found |= {int(pid) for pid in listed.stdout.split()}
        return {pid for pid in found - ours if b"sshd" not in command_line(pid) and is_alive(pid)}

    def start_steps(self) -> subprocess.Popen[str]:
        """Start a job with workers, and wait until all replicas make steps."""
        launcher = self.start("--workers", "--", "python", STEPS)

        def make_steps() -> bool:
            assert launcher.poll() is None, self.finish(launcher)
            return len(list(self.directory.glob("ordinal-*"))) == 4

        wait_until(make_steps, "the steps", PATIENCE_S)
        return launcher


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def pod(namespaces: list[Host], tmp_path: Path) -> Iterator[SshPod]:
    """A pod whose hosts are reached by ssh. Hosts end with the test, with all that they run."""
    if not HAS_SSH:
        pytest.skip(MISSING)
    pod, servers = SshPod(namespaces, tmp_path), []
    try:
        for number, host in enumerate(namespaces):
            directory = tmp_path / f"sshd-{number}"
            directory.mkdir()
            ssh_files(directory, host.address, 22)
            servers.append(start_sshd(directory, *host.prefix))
            text = (directory / "ssh_config").read_text().replace("Host *", f"Host {host.address}")
            with (tmp_path / "ssh_config").open("a") as config:
                config.write(text)
        yield pod
    finally:
        for launcher in pod.launchers:
            launcher.kill()
            launcher.communicate()
        for server in servers:
            stop(server)


def test_digits_trains_on_two_workers_by_one_command(pod: SshPod) -> None:
    done = pod.finish(pod.start("--workers", "--", "python", "-m", "polyxla_examples.digits"))
    assert done.returncode == 0, done.stderr
    result = re.compile(r"^\[(w\d)\] runtime xrt .* world_size 4 .* test_accuracy ([\d.]+) ", re.MULTILINE)
    found = result.findall(done.stdout)
    assert sorted(host for host, _ in found) == ["w0", "w1"]
    assert all(float(accuracy) >= 0.97 for _, accuracy in found)
    assert pod.processes() == set()


def test_no_command_line_log_or_record_has_the_token(pod: SshPod) -> None:
    launcher = pod.start_steps()
    lines = {pid: command_line(pid) for pid in pod.processes()}
    (file, *others) = {
        line.split(b"--token-file\0")[1].split(b"\0")[0].decode()
        for line in lines.values()
        if b"--token-file" in line
    }
    token = Path(file).read_text()
    assert len(token) == 64
    assert {Path(other).read_text() for other in others} == {token}
    launcher.send_signal(signal.SIGINT)
    done = pod.finish(launcher)
    assert done.returncode == 128 + signal.SIGINT
    assert not any(token.encode() in line for line in lines.values())
    assert token not in done.stdout + done.stderr
    kept = [path for path in (pod.directory / "polyxla").rglob("*") if path.is_file()]
    assert any("polyxla worker: lease granted" in path.read_text() for path in kept)
    assert not any(token in path.read_text() for path in kept)
    wait_for_end_of(pod.processes())
    assert not Path(file).exists()


def test_a_worker_that_is_killed_is_named_with_its_host(pod: SshPod) -> None:
    launcher = pod.start_steps()
    address = f"{pod.hosts[1].address}:8470"
    (worker,) = {
        pid for pid in pod.processes() if address.encode() in command_line(pid) and parent_is_host(pid)
    }
    os.kill(worker, signal.SIGKILL)
    done = pod.finish(launcher)
    assert done.returncode == 128 + signal.SIGKILL
    errors = [line for line in done.stderr.splitlines() if line.startswith("polyxla: error: ")]
    where = f"w1 ({pod.hosts[1].address})"
    assert errors[0].startswith(f"polyxla: error: {where}: its worker at {address} was ended by SIGKILL")
    wait_for_end_of(pod.processes())


def parent_is_host(pid: int) -> bool:
    """Return whether a process was started by a host's session: a worker's own process was not."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return b"polyxla_pod.host" in command_line(parent)


def test_a_replica_that_raises_on_the_second_host_explains_the_end(pod: SshPod) -> None:
    done = pod.finish(pod.start("--workers", "--", "python", STEPS, "raise"))
    assert done.returncode == 1
    assert "[w1] ValueError: no more records\n" in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("polyxla: error: ")]
    assert errors[0].startswith(f"polyxla: error: w1 ({pod.hosts[1].address}): the command ended with")
    assert pod.processes() == set()


def test_nothing_is_left_on_any_host_if_the_launcher_is_killed(pod: SshPod) -> None:
    launcher = pod.start_steps()
    launcher.kill()
    wait_for_end_of(pod.processes())


@pytest.mark.long
def test_a_retry_starts_the_workers_again(pod: SshPod) -> None:
    done = pod.finish(pod.start("--workers", "--retry", "1", "--", "python", STEPS, "raise", "once"))
    assert done.returncode == 0, done.stderr
    assert "starting again in 1 s, retry 1 of 1" in done.stderr
    logs = [path.read_text() for path in pod.directory.glob("polyxla/pod/*/output.jsonl")]
    lines = [json.loads(line) for line in logs[0].splitlines()]
    assert len([line for line in lines if tpu_nodes.READY in line["text"]]) == 4


def test_workers_that_already_run_are_used_and_missing_ones_named(
    pod: SshPod, serve: Callable[..., Served]
) -> None:
    serve(pod.hosts[0], 2, tpu_nodes.WORKER_PORT)
    done = pod.finish(pod.start("--", "python", STEPS, "end"))
    assert done.returncode == 2
    second = pod.hosts[1].address
    assert f"w1 ({second}): no worker listens at {second}:8470: Connection refused." in done.stderr
    assert "Start one there with `polyxla worker`, or pass --workers." in done.stderr
    serve(pod.hosts[1], 2, tpu_nodes.WORKER_PORT)
    done = pod.finish(pod.start("--workers", "--", "python", STEPS, "end"))
    assert done.returncode == 2
    assert "port 8470 is in use" in done.stderr
    done = pod.finish(pod.start("--", "python", STEPS, "end"))
    assert done.returncode == 0, done.stderr
    assert len(list(pod.directory.glob("ordinal-*"))) == 4


def test_the_launcher_and_the_runtime_mean_the_same_variables() -> None:
    names = [name for name in dir(tpu_nodes) if name.startswith(("XRT_", "TPU_"))]
    assert {name: getattr(tpu_nodes, name) for name in names} == {name: getattr(env, name) for name in names}
    assert tpu_nodes.CREDENTIALS == env.CLIENT
    assert addresses.DEFAULT_PORT == tpu_nodes.WORKER_PORT
    assert str(configuration.DEFAULT_CORES) == tpu_nodes.DEFAULT_CORES
    hosts = ("10.0.0.1", "fd00::2")
    for host in range(2):
        read = configuration.read_configuration(tpu_nodes.variables({}, hosts, 8470, host))
        assert read is not None
        assert [worker.address for worker in read.workers] == ["10.0.0.1:8470", "[fd00::2]:8470"]
        assert (read.host_index, read.hosts, read.mesh_address) == (host, 2, "10.0.0.1:8477")
        assert read.warnings == ()
