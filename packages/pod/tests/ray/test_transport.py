"""`polyxla pod run --ray` on a real cluster of two nodes: output, exit codes, and how it can fail."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyxla_testing.processes import wait_for_end_of

if TYPE_CHECKING:
    from conftest import Drivers, RayCluster

pytestmark = pytest.mark.timeout(400)

SLEEPER = str(Path(__file__).parent / "programs" / "sleeper.py")


@pytest.mark.slow
def test_hosts_are_numbered_by_worker_id_and_have_their_nodes_environment(
    drivers: Drivers, cluster: RayCluster
) -> None:
    show = "echo $TPU_WORKER_HOSTNAMES, ${OMP_NUM_THREADS-no}, ${TPU_VISIBLE_CHIPS-no}, $POLYXLA_EMULATE_HOST"
    done = drivers.run("--env", "POLYXLA_EMULATE=v4-16", "--", "sh", "-c", show)
    assert done.returncode == 0, done.stderr
    common = f"{','.join(cluster.hosts)}, no, no"
    assert sorted(done.stdout.splitlines()) == [f"[w0] {common}, 0", f"[w1] {common}, 1"]


@pytest.mark.slow
def test_the_first_host_that_fails_is_named_and_its_traceback_shown_once(
    drivers: Drivers, cluster: RayCluster
) -> None:
    done = drivers.run("--", sys.executable, SLEEPER, "1")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "[w1] RuntimeError: boom on 1\n" in done.stderr
    assert f"polyxla: error: w1 ({cluster.hosts[1]}): the command ended with exit code 1\n" in done.stderr
    wait_for_end_of(drivers.pids(4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)],
    ids=lambda sent: sent.name,
)
def test_nothing_is_left_when_the_driver_ends(drivers: Drivers, number: signal.Signals) -> None:
    process = drivers.start_run("--", sys.executable, SLEEPER)
    pids = drivers.pids(4)
    process.send_signal(number)
    code = drivers.finish(process).returncode
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    wait_for_end_of(pids)


@pytest.mark.slow
def test_chips_that_another_job_holds_are_an_error(drivers: Drivers) -> None:
    drivers.start_run("--", sys.executable, SLEEPER)
    drivers.pids(4)
    done = drivers.run("--", "true")
    assert done.returncode == 2
    assert "Ray did not give all chips of my-tpu (v4-16, 2 host(s)) within 15 s" in done.stderr


@pytest.mark.slow
def test_a_lost_node_is_named_and_a_retry_waits_for_the_one_that_replaces_it(
    drivers: Drivers, cluster: RayCluster
) -> None:
    process = drivers.start_run("--lost-after", "60", "--retry", "1", "--", sys.executable, SLEEPER)
    pids = drivers.pids(4)
    cluster.order("remove 1")
    cluster.order("add 1")
    done = drivers.finish(process)
    assert f"error: w1 ({cluster.hosts[1]}): its Ray node was lost, or the actor on it: " in done.stderr
    assert done.returncode == 0, done.stderr
    wait_for_end_of(pids)


def test_a_host_that_is_missing_is_named(drivers: Drivers, cluster: RayCluster) -> None:
    cluster.order("leave 1")
    done = drivers.run("--", "true")
    cluster.order("add 1")
    assert done.returncode == 2
    assert "the slice my-tpu (v4-16, 1 host(s)) is not whole: no node is worker 1" in done.stderr


def test_an_address_without_a_cluster_is_an_error(drivers: Drivers) -> None:
    drivers.environ["RAY_ADDRESS"] = "127.0.0.1:1"
    done = drivers.run("--", "true")
    assert done.returncode == 2
    assert "there is no Ray cluster: 127.0.0.1:1 cannot be reached" in done.stderr
    assert "(from RAY_ADDRESS=127.0.0.1:1)" in done.stderr


@pytest.mark.parametrize("option", ["--hosts=a,b", "--engine-option=zone=x"])
def test_an_option_of_another_engine_is_refused(drivers: Drivers, option: str) -> None:
    done = drivers.run(option, "--", "true")
    assert done.returncode == 2
    assert option.rpartition("=")[2] in done.stderr


@pytest.mark.long
def test_digits_trains_on_a_ray_cluster_by_one_command(drivers: Drivers) -> None:
    digits = ["--env", "POLYXLA_EMULATE=v4-16", "--", sys.executable, "-m", "polyxla_examples.digits"]
    done = drivers.run(*digits)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\[(w\d)\] .*world_size 8 .* test_accuracy ([\d.]+) ", done.stdout, re.MULTILINE)
    assert sorted(host for host, _ in found) == ["w0", "w1"]
    assert all(float(accuracy) >= 0.97 for _, accuracy in found)
