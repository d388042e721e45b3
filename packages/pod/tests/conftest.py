"""Fixtures: hosts as real sshd servers on loopback, or as a stand-in for ssh, and the command under test."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from polyxla.plugin import free_ports
from polyxla_pod.messages import HostMessage, decode

# pytest rewrites the assertions in it, unless it is imported here before.
pytest_plugins = ["polyxla_testing.fixtures"]

TIMEOUT_S = 60.0
PROGRAMS = Path(__file__).parent / "programs"
STAND_IN = '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n'


@dataclass
class Commands:
    """Starts commands with an environment of their own, and ends what is left when its context ends.

    Attributes:
        directory: of this test.
        environ: the environment of the commands.
        processes: those that were started.
    """

    timeout_s: ClassVar[float] = TIMEOUT_S
    directory: Path
    environ: dict[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def start_command(self, *command: str, directory: Path | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=self.environ,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Ctrl-C in a test reaches no other process.
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        """Wait for the end of a command; return its output."""
        out, err = process.communicate(timeout=self.timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def pids(self, count: int) -> list[int]:
        """Wait until programs have written that many process ids; return them."""
        from polyxla_testing.processes import wait_until

        files = self.directory.glob
        wait_until(lambda: len(list(files("*.pid"))) >= count, f"{count} processes", self.timeout_s)
        return [int(path.read_text()) for path in files("*.pid")]


@dataclass
class Pod(Commands):
    """Starts ``polyxla pod``.

    Attributes:
        options: arguments of each ``polyxla pod run``.
        prefix: what runs the launcher, such as a command that enters a network namespace.
    """

    options: list[str] = field(default_factory=list)
    prefix: list[str] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start_command(*self.prefix, sys.executable, "-m", "polyxla", "pod", *arguments)

    def start_run(self, hosts: str, *arguments: str) -> subprocess.Popen[str]:
        return self.start("run", "--hosts", hosts, *self.options, *arguments)

    @staticmethod
    def unfolded(output: str) -> dict[str, list[str]]:
        """Return each host's lines: under load, a host may be too late for the others' line."""
        found: dict[str, list[str]] = {}
        for hosts, text in re.findall(r"^\[(w[\w,-]+)\] (.*)$", output, re.MULTILINE):
            for part in hosts.split(","):
                first, _, last = part.replace("w", "").partition("-")
                for host in range(int(first), int(last or first) + 1):
                    found.setdefault(f"w{host}", []).append(text)
        return found

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(*arguments))

    def run(self, hosts: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start_run(hosts, *arguments))

    def program(self, name: str, *arguments: str) -> list[str]:
        """Return the part of a command line after the options: a program of this directory's."""
        return [
            "--env",
            f"POD_TEST={self.directory}",
            "--env",
            "NUMBER={host}",
            "--",
            sys.executable,
            str(PROGRAMS / name),
            *arguments,
        ]


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Pod]:
    """A pod whose `ssh` runs the program on this machine, so that a test needs no server."""
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "ssh").write_text(STAND_IN)
    (directory / "ssh").chmod(0o755)
    with _pod(tmp_path) as pod:
        pod.environ["PATH"] = f"{directory}:{pod.environ['PATH']}"
        yield pod


def _pod(directory: Path) -> Pod:
    environ = {**os.environ, "XDG_STATE_HOME": str(directory / "state")}
    return Pod(directory, environ, options=["--python", sys.executable, "--grace", "1"])


@dataclass(frozen=True)
class SshServer:
    """A running sshd, and the file for ``ssh -F`` in which its hosts are."""

    directory: Path
    port: int

    @property
    def config(self) -> Path:
        return self.directory / "ssh_config"

    def add_host(self, name: str, port: int) -> None:
        """Give a port of this machine the name of a host."""
        with self.config.open("a") as config:
            config.write(f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """A real OpenSSH server on loopback, with the hosts one, two and three."""
    from polyxla_testing.processes import wait_until
    from polyxla_testing.ssh_servers import HAS_SSH, MISSING, ssh_files, start_sshd, stop

    if not HAS_SSH:
        pytest.skip(MISSING)

    directory = tmp_path_factory.mktemp("sshd")
    (port,) = free_ports(1)
    ssh_files(directory, "127.0.0.1", port)
    found = SshServer(directory, port)
    for name in ("one", "two", "three"):
        found.add_host(name, port)
    process = start_sshd(directory)
    try:
        wait_until(lambda: _answers(found), f"sshd: {(directory / 'sshd.log').read_text()}", TIMEOUT_S)
        yield found
    finally:
        stop(process)


def _answers(server: SshServer) -> bool:
    command = ["ssh", "-F", str(server.config), "-o", "BatchMode=yes", "one", "true"]
    return subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False).returncode == 0


@pytest.fixture
def ssh(server: SshServer, tmp_path: Path) -> Iterator[Pod]:
    """A pod of hosts that are reached through a real OpenSSH server."""
    with _pod(tmp_path) as pod:
        pod.options += ["--engine-option=-F", f"--engine-option={server.config}"]
        yield pod


@dataclass(frozen=True)
class Networks:
    """Network namespaces: the launcher's, and one for each of two hosts, with a link to the launcher's."""

    name: str

    def enter(self, which: str) -> list[str]:
        """Return what runs a command in a namespace."""
        return ["ip", "netns", "exec", f"{self.name}-{which}"]

    def cut(self, which: str) -> None:
        """Take down a host's link."""
        run_quietly(*self.enter(which), "ip", "link", "set", "eth0", "down")


ADDRESSES = {"one": "10.231.1", "two": "10.231.2"}
NAMESPACES = ("launcher", *ADDRESSES)


def run_quietly(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)


@pytest.fixture
def networks() -> Iterator[Networks]:
    """Two hosts, each with a link of its own to the launcher. Needs the privilege to make namespaces."""
    found = Networks(f"polyxla-{os.getpid()}")
    try:
        for which in NAMESPACES:
            run_quietly("ip", "netns", "add", f"{found.name}-{which}")
            run_quietly(*found.enter(which), "ip", "link", "set", "lo", "up")
        for which, prefix in ADDRESSES.items():
            launcher = found.enter("launcher")
            peer = ["peer", "name", "eth0", "netns", f"{found.name}-{which}"]
            run_quietly(*launcher, "ip", "link", "add", which, "type", "veth", *peer)
            for namespace, device, number in ((launcher, which, 1), (found.enter(which), "eth0", 2)):
                run_quietly(*namespace, "ip", "address", "add", f"{prefix}.{number}/24", "dev", device)
                run_quietly(*namespace, "ip", "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(found)
        pytest.skip(f"no network namespaces with links can be made here: {error}")
    try:
        yield found
    finally:
        _remove(found)


def _remove(networks: Networks) -> None:
    for which in NAMESPACES:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            run_quietly("ip", "netns", "del", f"{networks.name}-{which}")


@pytest.fixture
def linked(networks: Networks, tmp_path: Path) -> Iterator[Pod]:
    """A pod of two hosts in network namespaces, each with a real OpenSSH server."""
    from polyxla_testing.ssh_servers import HAS_SSH, MISSING, ssh_files, start_sshd, stop

    if not HAS_SSH:
        pytest.skip(MISSING)
    servers = []
    with _pod(tmp_path) as pod:
        pod.prefix = networks.enter("launcher")
        try:
            for which, prefix in ADDRESSES.items():
                directory = tmp_path / which
                directory.mkdir()
                ssh_files(directory, f"{prefix}.2", 22)
                servers.append(start_sshd(directory, *networks.enter(which)))
                with (tmp_path / "ssh_config").open("a") as config:
                    config.write(f"Host {which}\n  HostName {prefix}.2\n")
                    config.write((directory / "ssh_config").read_text().replace("Host *\n", ""))
            pod.options += ["--engine-option=-F", f"--engine-option={tmp_path / 'ssh_config'}"]
            yield pod
        finally:
            for server in servers:
                stop(server)


class PipedHost:
    """A host's process and the launcher's end of its pipes."""

    def __init__(self, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "polyxla_pod.host"],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.receive("hello")

    def send(self, kind: str, **content: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(HostMessage(kind, content).encode())
        self.process.stdin.flush()

    def start(self, *command: str, **environ: str) -> None:
        self.send("start", command=list(command), environ=environ, directory=None)

    def receive(self, kind: str) -> HostMessage:
        """Return the next message of this kind, past others."""
        assert self.process.stdout
        while message := decode(self.process.stdout.readline()):
            if message.kind == kind:
                return message
        raise AssertionError(f"the host ended without {kind}")

    def lines(self) -> list[str]:
        """Return the texts of all lines until the end."""
        assert self.process.stdout
        messages = [decode(line) for line in self.process.stdout]
        return [message.content["text"] for message in messages if message and message.kind == "line"]


@contextlib.contextmanager
def open_host(**environ: str) -> Iterator[PipedHost]:
    """A host's process with these variables."""
    host = PipedHost(**environ)
    try:
        yield host
    finally:
        host.process.kill()
        assert host.process.stdin
        assert host.process.stdout
        host.process.stdout.close()
        host.process.stdin.close()
        host.process.wait(TIMEOUT_S)


@pytest.fixture
def host() -> Iterator[PipedHost]:
    with open_host() as host:
        yield host


@pytest.fixture
def open_hosts() -> Callable[..., contextlib.AbstractContextManager[PipedHost]]:
    return open_host


@pytest.fixture
def timed() -> Callable[[], float]:
    """Returns the seconds since the test's fixtures were made."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin
