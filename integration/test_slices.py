"""Jobs on several emulated slices: replicas, SPMD programs, their losses, and slices that are lost."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from polyxla.plugin import free_ports
from polyxla_testing import RuntimeUnderTest

pytestmark = pytest.mark.emulated_tpu

PROGRAMS = Path(__file__).parent / "programs"
TWO = {"POLYXLA_EMULATE": "2xv4-8"}
PATIENCE_S = 300
ONE_SLICE = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def hosts_of_slices() -> list[dict[str, str]]:
    """Return the variables of two launches, each of which emulates the only host of a slice."""
    first = f"127.79.{os.getpid() % 250}"
    shared = {**TWO, "MEGASCALE_COORDINATOR_ADDRESS": f"{first}.1:8080"}
    return [
        {**shared, "POLYXLA_EMULATE_HOST": str(host), "TPU_WORKER_HOSTNAMES": f"{first}.{host + 1}"}
        for host in range(2)
    ]


def losses(done: subprocess.CompletedProcess[str], devices: int) -> list[float]:
    """Return the losses that the program printed, and then the accuracy."""
    assert done.returncode == 0, done.stderr[-3000:]
    count, *values = map(float, done.stdout.split())
    assert count == devices
    return values


def training(task: str, way: str) -> list[str]:
    return [str(PROGRAMS / "train_on_slices.py"), task, way]


@cache
def on_cpu(task: str) -> list[float]:
    return losses(run(training(task, "cpu"), dict(os.environ)), 1)


@pytest.mark.slow
@pytest.mark.pjrt
def test_torch_xla_sees_slices_with_coordinates_of_their_own(clean_environ: dict[str, str]) -> None:
    done = run([str(PROGRAMS / "describe_slices.py")], {**clean_environ, **TWO})
    assert done.returncode == 0, done.stderr
    found = sorted(
        ast.literal_eval(text) for text in re.findall(r"^DESCRIBED (.*)$", done.stdout, re.MULTILINE)
    )
    places = [(slice_index, *chip) for slice_index in range(2) for chip in ONE_SLICE]
    # The worker's number, as torch_xla asks for it, is that in its slice.
    assert found == [[ordinal, 0, str(ordinal // 4), 28, places] for ordinal in range(8)]
    assert "emulating a 2xv4-8 on this machine's CPU: 8 replicas, 2 hosts" in done.stderr


@pytest.mark.slow
@pytest.mark.pjrt
def test_a_decoder_trains_as_replicas_on_two_slices(clean_environ: dict[str, str]) -> None:
    done = run(training("decoder", "replicas"), {**clean_environ, **TWO})
    assert losses(done, 8) == pytest.approx(on_cpu("decoder"), abs=1e-5)


@pytest.mark.slow
@pytest.mark.pjrt
@pytest.mark.parametrize(
    ("task", "least_accuracy"), [("decoder", 0.1), pytest.param("digits", 0.95, marks=pytest.mark.long)]
)
def test_training_on_a_hybrid_mesh_of_two_slices(
    clean_environ: dict[str, str], task: str, least_accuracy: float
) -> None:
    with ThreadPoolExecutor(2) as hosts:
        environs = [{**clean_environ, **host} for host in hosts_of_slices()]
        for done in hosts.map(lambda environ: run(training(task, "spmd"), environ), environs):
            found = losses(done, 8)
            assert found == pytest.approx(on_cpu(task), abs=1e-5)
            assert found[-1] > least_accuracy
            assert "8 devices, 4 of them on this host, one SPMD program" in done.stderr


@pytest.mark.long
def test_digits_trains_on_two_slices_as_on_one(runtime: RuntimeUnderTest) -> None:
    command = ["-m", "polyxla_examples.digits", "--epochs", "1", "--json"]
    found = []
    for tpu in ("2xv4-8", "v4-16"):
        done = runtime.run(*command, POLYXLA_EMULATE=tpu)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert [result["world_size"] for result in found] == [8, 8]
    assert found[0]["test_accuracy"] == found[1]["test_accuracy"]


@contextmanager
def launched(runtime: RuntimeUnderTest, environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    script = str(PROGRAMS / "steps_on_slices.py")
    with subprocess.Popen(
        [sys.executable, "-m", "polyxla", "run", "--runtime", runtime.name, script],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def processes_of(launch: subprocess.Popen[str], count: int) -> dict[int, list[int]]:
    """Wait until each replica has printed its slice and its process; return the processes of each slice."""
    assert launch.stdout is not None
    found: dict[int, list[int]] = {}
    for _ in range(count):
        marker, slice_id, pid = launch.stdout.readline().split()
        assert marker == "STEPS"
        found.setdefault(int(slice_id), []).append(int(pid))
    return found


@pytest.mark.parametrize(
    ("killed", "expected"),
    [
        (
            4,
            r"process \d of slice 1 \(.*was ended by SIGKILL.*; slice 1 is lost: its 4 processes here were",
        ),
        pytest.param(
            1, r"process \d of slice 1 \(replica \d; pid \d+\) was ended by SIGKILL", marks=pytest.mark.long
        ),
    ],
)
def test_a_lost_slice_is_named(
    runtime: RuntimeUnderTest, clean_environ: dict[str, str], killed: int, expected: str
) -> None:
    with launched(runtime, {**clean_environ, **TWO}) as launch:
        for pid in processes_of(launch, 8)[1][:killed]:
            os.kill(pid, signal.SIGKILL)
        _, said = launch.communicate(timeout=PATIENCE_S)
    assert launch.returncode != 0
    assert re.search(f"^polyxla: error: {expected}", said, re.MULTILINE), said[-3000:]
    assert ("is lost" in said) == (killed == 4)


def test_a_lost_host_of_a_slice_is_named_by_the_launch_of_another(
    runtime: RuntimeUnderTest, clean_environ: dict[str, str]
) -> None:
    first, second = hosts_of_slices()
    names = ("POLYXLA_MONITOR_PORT", "MASTER_PORT", "TORCH_TPU_INTERNAL_HANDSHAKE_PORT")
    ports = dict(zip(names, map(str, free_ports(3)), strict=True))
    with (
        launched(runtime, {**clean_environ, **first, **ports}) as own,
        launched(runtime, {**clean_environ, **second, **ports}) as other,
    ):
        assert list(processes_of(own, 4)) == [0]
        assert list(processes_of(other, 4)) == [1]
        other.kill()
        _, said = own.communicate(timeout=PATIENCE_S)
    assert own.returncode == 1
    assert re.search(
        "^polyxla: error: host 0 of slice 1 is gone: its launching process ended", said, re.MULTILINE
    ), said[-3000:]


@pytest.mark.pjrt
@pytest.mark.long
def test_a_slice_of_64_chips_starts_on_a_small_machine(clean_environ: dict[str, str]) -> None:
    growth = Path(__file__).parents[1] / "benchmarks" / "growth.py"
    done = run([str(growth), "replicas", "64", "--json"], clean_environ)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["chips"], row["processes"], row["failed"]) == (64, 64, "")
    # The aims, on two cores.
    assert row["seconds"] < 180
    assert row["gib"] < 16
