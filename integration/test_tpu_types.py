"""Programs on each type of TPU, and on a pod whose hosts are started one by one."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.pjrt, pytest.mark.timeout(3000)]

ROOT = Path(__file__).parents[1]
SEEDS, PROGRAMS = ROOT / "integration" / "seeds", ROOT / "integration" / "programs"
TIMEOUT_S = 600
"""Longest run of one program, of which a test has up to five."""
DIGITS = ("-m", "polyxla", "run", "-m", "polyxla_examples.digits", "--json")
CHECK = ("-m", "polyxla", "check-replicas", "--json", "integration.test_check_replicas:plain", "--devices")
REPLICAS = {"v4-8": 4, "v2-8": 8, "v3-8": 8, "v5e-8": 8, "v6e-8": 8, "tpu7x-8": 8}
POD = {"POLYXLA_EMULATE": "v4-16"}
"""Two hosts with four replicas each."""

each_type = pytest.mark.parametrize(
    "kind", ["v4-8", *(pytest.param(kind, marks=pytest.mark.long) for kind in REPLICAS if kind != "v4-8")]
)
RunOnHosts = Callable[..., list[str]]
CheckMnist = Callable[[str, range], None]


@pytest.fixture
def run_on_host(clean_environ: dict[str, str]) -> Callable[..., str]:
    """Run Python with these arguments on the only host of a type, and return what it printed."""

    def run(kind: str, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            env={**clean_environ, "POLYXLA_EMULATE": kind},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def run_on_pod(clean_environ: dict[str, str]) -> RunOnHosts:
    """Run Python with each of these arguments on one host of `POD`, and return what each host printed."""
    first = f"127.77.{os.getpid() % 250}"
    pod = {**clean_environ, **POD, "TPU_WORKER_HOSTNAMES": f"{first}.1,{first}.2"}

    def run(*commands: tuple[str, ...]) -> list[str]:
        hosts = [
            subprocess.Popen(
                [sys.executable, *command],
                env={**pod, "POLYXLA_EMULATE_HOST": str(host)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host, command in enumerate(commands)
        ]
        try:
            outputs = [host.communicate(timeout=TIMEOUT_S) for host in hosts]
        finally:
            for host in hosts:
                host.terminate()
        assert [host.returncode for host in hosts] == [0, 0], outputs
        return [printed for printed, _ in outputs]

    return run


def _last(output: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(output.splitlines()[-1])
    return document


def _check_digits(output: str, replicas: int) -> None:
    result = _last(output)
    steps = result["epochs"] * (math.ceil(1437 / replicas) // 32)
    found = {name: result[name] for name in ("device", "world_size", "steps")}
    assert found == {"device": "TPU", "world_size": replicas, "steps": steps}
    assert result["test_accuracy"] >= 0.97


@pytest.mark.long
@each_type
def test_digits_reaches_its_accuracy_on_each_type(run_on_host: Callable[..., str], kind: str) -> None:
    _check_digits(run_on_host(kind, *DIGITS), REPLICAS[kind])


@pytest.mark.slow
@each_type
def test_all_replicas_train_like_one_on_each_type(run_on_host: Callable[..., str], kind: str) -> None:
    report = json.loads(run_on_host(kind, *CHECK, str(REPLICAS[kind])))
    assert (report["devices"], report["within"]) == (REPLICAS[kind], True)


@pytest.mark.long
@each_type
def test_the_seeds_run_on_each_type(
    run_on_host: Callable[..., str], check_mnist: CheckMnist, kind: str, tmp_path: Path
) -> None:
    size = REPLICAS[kind]
    printed = run_on_host(kind, str(SEEDS / "tensors.py"))
    assert "devices do not mix: True" in printed
    assert "hardware TPU" in printed
    assert "saved and loaded both ways" in run_on_host(kind, str(SEEDS / "saving.py"), str(tmp_path))
    assert "steps 20 " in run_on_host(kind, str(SEEDS / "mnist_single.py"), "2560")
    _check_all_reduce(run_on_host(kind, str(SEEDS / "all_reduce.py")), range(size), size)
    check_mnist(run_on_host(kind, str(SEEDS / "mnist_multi.py"), str(1280 * size)), range(size))


def _check_all_reduce(output: str, ordinals: range, size: int) -> None:
    found = sorted(re.findall(r"ordinal (\d+) of (\d+) sum ([\d.]+)", output))
    assert found == [(str(ordinal), str(size), f"{sum(range(size)):.1f}") for ordinal in ordinals]


@pytest.mark.long
def test_digits_reaches_its_accuracy_on_a_pod(run_on_pod: RunOnHosts) -> None:
    for printed in run_on_pod(DIGITS, DIGITS):
        _check_digits(printed, 8)


@pytest.mark.long
def test_the_replicas_of_a_pod_train_like_one(run_on_pod: RunOnHosts) -> None:
    for printed in run_on_pod((*CHECK, "4"), (*CHECK, "4")):
        report = json.loads(printed)
        assert (report["devices"], report["within"]) == (8, True)


@pytest.mark.long
def test_the_seeds_run_on_a_pod(run_on_pod: RunOnHosts, check_mnist: CheckMnist) -> None:
    ordinals = range(4), range(4, 8)
    reduce = (str(SEEDS / "all_reduce.py"),)
    for printed, here in zip(run_on_pod(reduce, reduce), ordinals, strict=True):
        _check_all_reduce(printed, here, 8)
    mnist = (str(SEEDS / "mnist_multi.py"), "10240")
    for printed, here in zip(run_on_pod(mnist, mnist), ordinals, strict=True):
        check_mnist(printed, here)


@pytest.mark.long
def test_torchrun_may_number_the_hosts_of_a_pod_in_another_order(run_on_pod: RunOnHosts) -> None:
    from polyxla.plugin import free_ports

    options = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4", "--master-addr=127.0.0.1"]
    options.append(f"--master-port={free_ports(1)[0]}")
    program = str(PROGRAMS / "describe_torchrun.py")
    # The TPU's first host is torchrun's second.
    commands = [(*options, f"--node-rank={node}", program) for node in (1, 0)]
    for host, printed in enumerate(run_on_pod(*commands)):
        found = sorted(line.split()[1:] for line in printed.splitlines() if line.startswith("DESCRIBED"))
        # Ordinals count through the coordinates, x first; the chips of a host count along y first.
        expected = [
            ((1 - host) * 4 + rank, rank, 4 * host + ordinal, rank, 4 * host + rank, host, 28)
            for rank, ordinal in enumerate((0, 2, 1, 3))
        ]
        assert found == [[str(number) for number in numbers] for numbers in expected]
