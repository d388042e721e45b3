"""Fixtures of the whole suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from polyxla import Replica
from polyxla.env import lent

if TYPE_CHECKING:
    from polyxla.testing import RuntimeUnderTest

pytest_plugins = ["polyxla.testing.fixtures"]

# Tests count compilations, and a person's programs are not theirs.
os.environ["POLYXLA_COMPILE_CACHE"] = "off"


def pytest_configure(config: pytest.Config) -> None:
    """Register the suite's own mark."""
    config.addinivalue_line("markers", "pjrt: about what only that runtime has")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what says nothing of the runtime under test: it runs on the first one, pjrt."""
    is_first = config.getoption("--polyxla-runtime") == "pjrt"
    # Whole jobs on workers.
    jobs = Path(__file__).parent / "jobs"
    if is_first:
        told = [item for item in items if jobs not in item.path.parents]
    else:
        told = [item for item in items if jobs in item.path.parents or _is_about_it(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in told])
    items[:] = told


def _is_about_it(item: pytest.Item) -> bool:
    return "runtime" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("pjrt")


@pytest.fixture(scope="session", autouse=True)
def _device_first(pytestconfig: pytest.Config) -> None:
    """Touch the device before any test computes gradients: torch's autograd engine counts devices once."""
    is_node = pytestconfig.getoption("--polyxla-runtime") == "xrt"
    # What torch_xla sets in the environment when it is imported is not the tests'.
    with lent({**os.environ, **(_node_of_this_process() if is_node else {"PJRT_DEVICE": "CPU"})}):
        import torch_xla

        torch_xla.device()


def _node_of_this_process() -> dict[str, str]:
    """Describe a node that this process keeps until it ends: replicas that run inline are on it."""
    from polyxla_xrt.config.configuration import read
    from polyxla_xrt.plan import asked_plan, free_port

    environ = {"XRT_TPU_CONFIG": f"localservice;0;localhost:{free_port()}", "TPU_NUM_DEVICES": "1"}
    configuration = read(environ)
    assert configuration is not None
    return environ | asked_plan(configuration, environ).whole()


@pytest.fixture(scope="session")
def runtime(runtime: RuntimeUnderTest) -> Iterator[RuntimeUnderTest]:
    """The runtime under test, and what its replicas are to run on where that is not this machine itself."""
    if runtime.name != "xrt":
        yield runtime
        return
    with _worker(8) as address, lent({**os.environ, "XRT_TPU_CONFIG": f"tpu_worker;0;{address}"}):
        yield runtime


@contextmanager
def _worker(cores: int) -> Iterator[str]:
    """Serve cores on a port of their own, as in another terminal."""
    command = ["polyxla", "worker", "--address", "127.0.0.1:0", "--devices", str(cores), "--json"]
    worker = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    try:
        lines = iter(worker.stdout.readline, "")
        yield json.loads("".join(_until("}", lines)))["address"]
    finally:
        worker.terminate()
        worker.wait(30)
        worker.stdout.close()


def _until(end: str, lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield line
        if line.rstrip() == end:
            return


@pytest.fixture
def clean_environ() -> dict[str, str]:
    """An environment in which no variable chooses a runtime, or anything about it."""
    chooses = ("PJRT_", "XRT_", "TPU_", "POLYXLA_", "CPU_NUM_DEVICES", "TORCHELASTIC_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(chooses)}
    return clean | {"POLYXLA_COMPILE_CACHE": "off"}


@pytest.fixture
def require_layout(runtime: RuntimeUnderTest) -> Callable[[int, int], None]:
    """Skip a test of replicas that share processes where each has its own."""

    def require(count: int, processes: int) -> None:
        if runtime.name == "xrt" and processes != count:
            pytest.skip("on a TPU node each replica is a process")

    return require


@pytest.fixture
def everywhere(
    request: pytest.FixtureRequest,
    runtime: RuntimeUnderTest,
    require_layout: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., list[Any]]:
    """Run ``function(replica, *args)`` in every replica of one layout, and see that it was that layout.

    Parametrized indirectly with the number of replicas and of the processes that share them.
    """
    count, processes = request.param
    require_layout(count, processes)
    monkeypatch.setenv("POLYXLA_PJRT_PROCESSES", str(processes))

    def launch(function: Callable[..., Any], *args: Any) -> list[Any]:
        # A process also where there is one: what torch.distributed leaves behind ends with it.
        start = "spawn" if count == 1 else "auto"
        answers = runtime.launch(_with_layout, function, *args, devices=count, start_method=start)
        assert [layout for layout, _ in answers] == [(count, processes)] * count
        return [result for _, result in answers]

    return launch


def _with_layout(replica: Replica, function: Callable[..., Any], *args: Any) -> Any:
    return (replica.world_size, replica.world.process_count), function(replica, *args)
