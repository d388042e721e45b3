"""`polyxla.launch(..., pod="ray")` from a script: results, exceptions, and the end of the driver."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbclient import NotebookClient

import polyxla
from polyxla_testing.processes import wait_for_end_of

if TYPE_CHECKING:
    from conftest import Drivers, RayCluster

pytestmark = pytest.mark.timeout(400)

TIMEOUT_S = 180.0
CELLS = [
    "import polyxla\ndef add(replica, number):\n    return replica.ordinal, number + 2",
    'print("LAUNCHED", polyxla.launch(add, (3,), pod="ray", accelerator="cpu", devices=1))',
]
LAUNCHING = str(Path(__file__).parent / "programs" / "launching.py")


@pytest.mark.long
def test_the_results_of_all_hosts_are_in_the_order_of_their_ordinals(drivers: Drivers) -> None:
    drivers.environ["POLYXLA_EMULATE"] = "v4-16"
    done = drivers.finish(drivers.start(LAUNCHING, "return", "."))
    assert done.returncode == 0, done.stderr
    hosts = [(ordinal, str(ordinal // 4)) for ordinal in range(8)]
    assert done.stdout.splitlines()[-1] == f"{hosts} False"


@pytest.mark.slow
def test_what_a_replica_raises_is_raised_at_the_driver_with_its_traceback_once(
    drivers: Drivers, cluster: RayCluster
) -> None:
    drivers.environ["POLYXLA_EMULATE"] = "v4-16"
    done = drivers.finish(drivers.start(LAUNCHING, "raise", "."))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "caught boom on 5"
    assert done.stderr.count('raise OwnError("boom on 5")') == 1, done.stderr
    assert "raised in the replica with ordinal 5 on " in done.stderr
    assert f"\non w1 ({cluster.hosts[1]})\n" in done.stderr
    assert "polyxla_pod.ray" not in done.stderr
    assert "ReplicaLostError" not in done.stderr


@pytest.mark.long
def test_a_cell_of_a_notebook_launches(drivers: Drivers) -> None:
    # A kernel that sees pytest's variable does not capture what child processes print.
    environ = {name: value for name, value in drivers.environ.items() if name != "PYTEST_CURRENT_TEST"}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=int(TIMEOUT_S), kernel_name="python3").execute(env=environ)
    assert "LAUNCHED [(0, 5), (0, 5)]\n" in "".join(output.text for output in notebook.cells[1].outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL],
    ids=lambda sent: sent.name,
)
def test_nothing_is_left_when_the_driver_of_a_launch_ends(drivers: Drivers, number: signal.Signals) -> None:
    process = drivers.start(LAUNCHING, "sleep", str(drivers.directory))
    pids = drivers.pids(2)
    process.send_signal(number)
    done = drivers.finish(process)
    # After KeyboardInterrupt, Ray's exit hooks decide about the code.
    assert done.returncode in ((1, -number) if number == signal.SIGINT else (-number,)), done.stderr
    assert done.stderr.count("KeyboardInterrupt") == (number == signal.SIGINT)
    wait_for_end_of(pids)


@pytest.mark.long
def test_a_host_whose_launch_is_killed_is_named(drivers: Drivers, cluster: RayCluster) -> None:
    process = drivers.start(LAUNCHING, "sleep", str(drivers.directory))
    pids = drivers.pids(2)
    os.kill(pids[0], signal.SIGKILL)
    done = drivers.finish(process)
    assert done.returncode == 1
    assert "ReplicaLostError: w" in done.stderr
    assert "the command was ended by SIGKILL" in done.stderr
    wait_for_end_of(pids)


def test_a_pod_that_no_plugin_knows_is_refused() -> None:
    with pytest.raises(polyxla.UsageError, match="no installed plugin launches on a pod called 'rey'"):
        polyxla.launch(print, pod="rey")


def test_a_function_that_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(
        polyxla.UsageError, match=r"cannot be sent to the hosts: cannot pickle '_thread.lock'"
    ):
        polyxla.launch(lambda _: lock, pod="ray")
