"""Another user of the machine, who tries every port that a running job has open."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from polyxla.plugin import free_ports

pytestmark = pytest.mark.pjrt

PROGRAM = Path(__file__).parent / "programs" / "gather_until.py"
PATIENCE_S = 200
LISTENS, ACCEPTS = "0A", 1 << 16
"""A TCP socket's state, and a Unix socket's flag. Source: Linux, ``net/tcp_states.h`` and ``net.h``."""
NOBODY = 65534
SILENT = 80
"""Connections that say nothing: more than our listeners keep, and more than a worker has places."""


class Marker:
    """Unpickled, it leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def descendants(root: int) -> Iterator[int]:
    yield root
    for children in Path(f"/proc/{root}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from descendants(int(child))


def sockets(roots: list[int]) -> dict[str, str]:
    """Return the inodes of the sockets of processes and their descendants, with the commands of those."""
    owners: dict[str, str] = {}
    for root in roots:
        for pid in descendants(root):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        owners[str(file.readlink()).removeprefix("socket:[").removesuffix("]")] = command
    return owners


def listening(owners: dict[str, str]) -> dict[tuple[str, int], str]:
    """Return the addresses at which sockets listen, with their owners."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if state == LISTENS and inode in owners:
                where, _, port = local.partition(":")
                # The kernel writes IPv4's four bytes last first; behind IPv6, they are its last ones.
                ip = socket.inet_ntoa(bytes.fromhex(where[-8:])[::-1])
                found[ip, int(port, 16)] = owners[inode]
    return found


def accepting(owners: dict[str, str], runtime: Path) -> list[str]:
    """Return the paths at which Unix sockets accept connections; those without a file begin with NUL."""
    lines = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    found = [
        fields[7]
        for fields in lines
        if len(fields) == 8 and int(fields[3], 16) & ACCEPTS and fields[6] in owners
    ]
    # A directory's descriptor may stand for a directory with a long path.
    named = [path for path in found if not path.startswith("/proc/self/")]
    files = [str(path) for path in runtime.rglob("*") if path.is_socket()]
    assert bool(files) == any(path.startswith("/") for path in found), (found, files)
    return [path.replace("@", "\0", 1) if path.startswith("@") else path for path in {*named, *files}]


def connect_as_nobody(path: str) -> int:
    """Connect to a Unix socket as another user, and send nonsense; return the error's number, or 0."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
            stranger.sendall(b"nonsense" * 1000)
        os._exit(0)
    except OSError as error:
        os._exit(error.errno or 1)


def attack(address: tuple[str, int], marker: Path, open_until_the_end: ExitStack) -> None:
    """Send what a listener of ours could misread, and leave connections and calls open."""
    pickled = pickle.dumps(Marker(marker))
    lines = [
        {"kind": "failed", "host": 0, "code": 0, "text": "give up"},
        {"kind": "account", "ordinal": 0, "in_device": False, "seconds": None},
        {"kind": "finished", "returned": [0, 1]},
        [1, {"replicas": 2, "processes": 2}, []],
    ]
    texts = [json.dumps(line).encode() + b"\n" for line in lines]
    texts += [
        b"[" * 50_000 + b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        pickled,
        len(pickled).to_bytes(4, "big") + pickled,
    ]
    for text in texts:
        with suppress(OSError), socket.create_connection(address, 5) as stranger:
            stranger.sendall(text)
    for _ in range(SILENT):
        with suppress(OSError):
            open_until_the_end.enter_context(socket.create_connection(address, 5))
    ended = threading.Event()
    open_until_the_end.callback(ended.set)

    def never() -> Iterator[bytes]:
        ended.wait(PATIENCE_S)
        yield from ()

    channel = open_until_the_end.enter_context(grpc.insecure_channel(f"{address[0]}:{address[1]}"))
    for method in (
        "worker.Worker/Status",
        "worker.Worker/Lease",
        "mesh.Mesh/Rendezvous",
        "mesh.Mesh/Goodbye",
    ):
        for _ in range(20):
            channel.stream_stream(f"/polyxla.xrt.{method}")(never(), timeout=PATIENCE_S)


def wait_for_listener(port: int, service: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            return
        assert service.poll() is None
        assert time.monotonic() < deadline, port
        time.sleep(0.1)


def wait_for(files: list[Path], job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(file.exists() for file in files):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, files
        time.sleep(0.1)


@dataclass(frozen=True)
class Place:
    """Where a job runs.

    Attributes:
        environ: its variables.
        services: commands that run beside it, of ``python -m polyxla``.
    """

    environ: dict[str, str]
    services: list[list[str]] = field(default_factory=list)


PLACES = {
    "an emulated TPU": Place({"POLYXLA_EMULATE": "v5e-4"}),
    "a TPU node": Place({"XRT_TPU_CONFIG": "localservice;0;127.0.0.1:{0}", "TPU_NUM_DEVICES": "2"}),
    "a worker with metrics": Place(
        {"XRT_TPU_CONFIG": "tpu_worker;0;127.0.0.1:{0}"},
        [["worker", "--address", "127.0.0.1:{0}", "--devices", "2", "--metrics-address", "127.0.0.1:{1}"]],
    ),
    "a warm process": Place({"PJRT_DEVICE": "CPU", "POLYXLA_DEVICES": "2"}, [["warm", "on"]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
def test_nothing_runs_ends_or_waits_for_a_stranger(
    clean_environ: dict[str, str], tmp_path: Path, where: str
) -> None:
    marker = tmp_path / "a stranger was here"
    ports = free_ports(2)
    place = PLACES[where]
    # Other users cannot enter pytest's directory, and perhaps not this user's own.
    runtime = Path(tempfile.mkdtemp())
    runtime.chmod(0o755)
    base = clean_environ | {"XDG_RUNTIME_DIR": str(runtime)}
    polyxla, pipe = [sys.executable, "-m", "polyxla"], subprocess.PIPE
    environ = base | {name: text.format(*ports) for name, text in place.environ.items()}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, runtime)
        roots = []
        for arguments in place.services:
            command = [*polyxla, *(text.format(*ports) for text in arguments)]
            service = stack.enter_context(subprocess.Popen(command, env=base))
            stack.callback(service.terminate)
            roots.append(service.pid)
            if arguments == ["warm", "on"]:
                assert service.wait(PATIENCE_S) == 0
                stack.callback(subprocess.run, [*polyxla, "warm", "off"], env=base, check=True)
                shown = subprocess.check_output([*polyxla, "warm", "status", "--json"], env=base)
                roots.append(json.loads(shown)["processes"][0]["pid"])
            else:
                wait_for_listener(ports[0], service)
        command = [*polyxla, "run", "--devices", "2", str(PROGRAM), str(tmp_path)]
        job = subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True)
        stack.enter_context(job)
        stack.callback(job.kill)
        first = tmp_path / "gathered-0"
        wait_for([first], job)
        owners = sockets([*roots, job.pid])
        found = listening(owners)
        for address in found:
            attack(address, marker, stack)
        for path in accepting(owners, runtime) if os.getuid() == 0 else ():
            assert connect_as_nobody(path) == (0 if path.startswith("\0") else errno.EACCES), path
        # The job continues.
        first.unlink()
        wait_for([first], job)
        (tmp_path / "end").touch()
        out, err = job.communicate(timeout=PATIENCE_S)
        assert job.returncode == 0, (found, err)
        if where == "a worker with metrics":
            assert service.poll() is None
    assert "GATHERED 2 2" in out
    assert not marker.exists()
    assert found
    assert all(address.startswith("127.") for address, _ in found), found
