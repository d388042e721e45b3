"""A pod: several workers, each driven by a host of its own, and one job on all of their cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from polyxla_xrt.plan import free_port

PATIENCE_S = 180
TRAIN = """
import torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.runtime as xr

def train(index):
    total = xm.all_reduce("sum", torch.ones((), device=torch_xla.device()) * xr.global_ordinal())
    torch_xla.sync()
    names = xm.rendezvous("names", str(xr.global_ordinal()).encode())
    # One string: several processes write to one pipe.
    print(f"ORDINAL {xr.global_ordinal()} {index} {xr.world_size()} {int(total)} {b''.join(names).decode()}\\n", end="")

if __name__ == "__main__":
    torch_xla.launch(train)
"""


class Host:
    """Where a worker and a launcher run: an address, and what stands before their commands."""

    def __init__(self, address: str, *prefix: str) -> None:
        self.address = address
        self.prefix = prefix

    def start(self, *command: str, **environ: str) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("XRT_", "PJRT_"))}
        return subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "polyxla", *command],
            env=clean | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )


def serve(host: Host, stack: ExitStack) -> str:
    """Start a worker of two cores on a host, and return its address."""
    worker = host.start(
        *("worker", "--address", f"{host.address}:0", "--devices", "2", "--insecure", "--json")
    )
    stack.callback(worker.communicate)
    stack.callback(worker.terminate)
    assert worker.stdout is not None
    told = "".join(iter(worker.stdout.readline, "}\n")) + "}"
    address: str = json.loads(told)["address"]
    return address


def run_on(hosts: Sequence[Host], script: Path) -> list[subprocess.CompletedProcess[str]]:
    """Start a worker on each host, then the script on each, as a pod's launcher does."""
    with ExitStack() as stack:
        addresses = [serve(host, stack) for host in hosts]
        config = "|".join(f"c_tpu_worker;{task};{address}" for task, address in enumerate(addresses))
        launchers = []
        mesh = f"{hosts[0].address}:{free_port()}"
        # The first comes last: the others wait for what it tells them.
        for task in reversed(range(len(hosts))):
            environ = {
                "XRT_LOCAL_WORKER": f"c_tpu_worker:{task}",
                "XRT_MESH_SERVICE_ADDRESS": mesh,
                "XRT_SHARD_WORLD_SIZE": str(len(hosts)),
                "TPU_NUM_DEVICES": "2",
            }
            if task == 0:
                environ["XRT_TPU_CONFIG"] = config
            launchers.append(hosts[task].start("run", str(script), **environ))
            stack.callback(launchers[-1].kill)
        done = [(one, *one.communicate(timeout=PATIENCE_S)) for one in launchers]
        return [subprocess.CompletedProcess(one.args, one.returncode, out, err) for one, out, err in done]


def check(done: Sequence[subprocess.CompletedProcess[str]]) -> None:
    assert [one.returncode for one in done] == [0] * len(done), [one.stderr for one in done]
    lines = sorted(line for one in done for line in one.stdout.split("\n") if line.startswith("ORDINAL"))
    assert lines == [f"ORDINAL {ordinal} {ordinal} 4 6 0123" for ordinal in range(4)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_two_workers_are_one_job(script: Path) -> None:
    # Two hosts in name only: loopback has many addresses.
    check(run_on([Host("127.0.0.1"), Host("127.0.0.2")], script))


@contextmanager
def namespaces() -> Iterator[list[Host]]:
    """Make two network namespaces with a cable between them."""
    names = [f"polyxla-{os.getpid()}-{number}" for number in range(2)]
    ends = [f"px{os.getpid() % 10**6}{letter}" for letter in "ab"]
    commands = [["ip", "netns", "add", name] for name in names]
    commands += [["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]]]
    hosts = []
    for number, (name, end) in enumerate(zip(names, ends, strict=True)):
        inside = ["ip", "-n", name]
        commands += [["ip", "link", "set", end, "netns", name]]
        commands += [[*inside, "addr", "add", f"10.211.55.{number + 1}/24", "dev", end]]
        commands += [[*inside, "link", "set", end, "up"], [*inside, "link", "set", "lo", "up"]]
        hosts.append(Host(f"10.211.55.{number + 1}", "ip", "netns", "exec", name))
    try:
        for command in commands:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def test_two_hosts_are_one_job(script: Path) -> None:
    with namespaces() as hosts:
        check(run_on(hosts, script))
