"""Another user of the machine, who tries every port that a running job has open."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest

from polyxla.launcher.ports import free_ports

pytestmark = pytest.mark.pjrt

PROGRAM = Path(__file__).parent / "programs" / "gather_until.py"
PATIENCE_S = 200
LISTENS = "0A"
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


def listening(root: int) -> dict[tuple[str, int], str]:
    """Return the addresses at which a process and its descendants listen, with the commands of those."""
    owners: dict[str, str] = {}
    for pid in descendants(root):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    owners[str(file.readlink())] = command
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split()
            inode = line.split()[9]
            if state == LISTENS and f"socket:[{inode}]" in owners:
                where, _, port = local.partition(":")
                # The kernel writes IPv4's four bytes last first; behind IPv6, they are its last ones.
                ip = socket.inet_ntoa(bytes.fromhex(where[-8:])[::-1])
                found[ip, int(port, 16)] = owners[f"socket:[{inode}]"]
    return found


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


def wait_for(files: list[Path], job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(file.exists() for file in files):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, files
        time.sleep(0.1)


PLACES = {
    "an emulated TPU": {"POLYXLA_EMULATE": "v5e-4"},
    "a TPU node": {"XRT_TPU_CONFIG": "localservice;0;127.0.0.1:{port}", "TPU_NUM_DEVICES": "2"},
}


@pytest.mark.parametrize("where", PLACES)
def test_nothing_runs_ends_or_waits_for_a_stranger(
    clean_environ: dict[str, str], tmp_path: Path, where: str
) -> None:
    marker = tmp_path / "a stranger was here"
    (port,) = free_ports(1)
    environ = clean_environ | {name: text.format(port=port) for name, text in PLACES[where].items()}
    command = [sys.executable, "-m", "polyxla", "run", "--devices", "2", str(PROGRAM), str(tmp_path)]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True) as job,
        ExitStack() as stack,
    ):
        stack.callback(job.kill)
        first = tmp_path / "gathered-0"
        wait_for([first], job)
        found = listening(job.pid)
        for address in found:
            attack(address, marker, stack)
        # It goes on.
        first.unlink()
        wait_for([first], job)
        (tmp_path / "end").touch()
        out, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, (found, err)
    assert "GATHERED 2 2" in out
    assert not marker.exists()
    assert found
    assert all(address.startswith("127.") for address, _ in found), found
