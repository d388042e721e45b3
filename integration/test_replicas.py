"""Several replicas on one machine: the same promises, plain torch_xla scripts, and what a failure does."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from polyxla import Replica, ReplicaLostError
from polyxla.testing import RuntimeConformance, RuntimeUnderTest
from polyxla_bridge import env as bridge_env
from polyxla_pjrt.discovery import discover, replica_environment

SEEDS = Path(__file__).parent / "seeds"


class TestReplicas(RuntimeConformance):
    devices = 4


def test_their_process_is_prepared_for_the_bridge_and_still_a_cpu(tmp_path: Path) -> None:
    prepared = replica_environment({}, discover({}, "auto", tmp_path), (0, 1, 2))
    assert prepared["PJRT_DEVICE"] == bridge_env.PJRT_CPU
    assert prepared[bridge_env.POLYXLA_BRIDGE_REPLICAS] == "3"
    assert prepared[bridge_env.POLYXLA_BRIDGE_COORDINATOR].startswith("127.0.0.1:")
    assert int(prepared["NPROC"]) == int(prepared["XLA_THREAD_POOL_SIZE"]) >= 12
    found = discover(prepared, "auto", tmp_path)
    assert (found.kind, found.unavailable, found.growable) == ("CPU", None, True)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_every_ordinal_is_summed(runtime: RuntimeUnderTest, count: int) -> None:
    done = runtime.run("--devices", str(count), str(SEEDS / "all_reduce.py"))
    assert done.returncode == 0, done.stderr
    found = re.findall(r"ordinal (\d+) of (\d+) sum ([\d.]+)", done.stdout)
    assert sorted(found) == [(str(i), str(count), f"{count * (count - 1) / 2}") for i in range(count)]


def test_multi_device_mnist_runs_unmodified(runtime: RuntimeUnderTest) -> None:
    done = runtime.run("--devices", "4", str(SEEDS / "mnist_multi.py"), "5120")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"ordinal (\d) steps (\d+) first ([\d.]+) last ([\d.]+)", done.stdout)
    assert sorted(line[0] for line in lines) == ["0", "1", "2", "3"]
    # Threads of one process draw from one generator, so each begins with weights of its own, as on a TPU.
    assert all(steps == "10" and float(last) < float(first) for _, steps, first, last in lines)


def test_digits_trains_on_four_replicas(runtime: RuntimeUnderTest) -> None:
    done = runtime.run("--devices", "4", "-m", "polyxla_examples.digits", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["world_size"], result["runtime"]) == (4, runtime.name)
    # 1437 images: 360 for each replica, the rest padded, in batches of 32 without the last.
    assert result["steps"] == result["epochs"] * 11
    assert result["test_accuracy"] >= 0.97


def test_one_replica_that_raises_ends_the_others(runtime: RuntimeUnderTest) -> None:
    with pytest.raises(ValueError, match="only ordinal 2") as caught:
        runtime.launch(_fail_on_two, devices=4)
    assert any("ordinal 2" in note for note in caught.value.__notes__)
    assert "_fail_on_two" in str(caught.value.__cause__)


def _fail_on_two(replica: Replica) -> None:
    if replica.ordinal == 2:
        raise ValueError("only ordinal 2")
    replica.barrier()


def test_a_killed_process_is_named(runtime: RuntimeUnderTest) -> None:
    with pytest.raises(ReplicaLostError, match=r"was ended by SIGKILL \(often the kernel, when memory"):
        runtime.launch(_kill_on_one, devices=2)


def _kill_on_one(replica: Replica) -> None:
    if replica.ordinal == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    replica.barrier()
