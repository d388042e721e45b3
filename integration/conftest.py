"""Fixtures of the whole suite."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from polyxla import Replica
from polyxla.plugin import temporary_environ
from polyxla_testing.processes import wait_until
from polyxla_tools.warm.sockets import find_sockets

if TYPE_CHECKING:
    from polyxla_testing import RuntimeUnderTest

pytest_plugins = ["polyxla_testing.fixtures"]

READY_S = 300.0
"""Longest wait for the process that this session prepares, in seconds."""
CORES = 8
"""Cores of the worker for runtime xrt, unless the option says another number; the default of a node."""

# Tests count compilations, so they must not use the programs in the user's cache.
os.environ["POLYXLA_COMPILE_CACHE"] = "off"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses the cores of the worker for runtime xrt."""
    parser.addoption(
        "--xrt-worker",
        default="",
        metavar="[NAME=VALUE ...] OPTIONS",
        help="such as '--platform plugin=PATH --plugin-option cpu_device_count=8', "
        "or 'POLYXLA_EMULATE=v4-8 --platform tpu --devices 4', always with the number of cores",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the suite's own mark."""
    config.addinivalue_line("markers", "pjrt: tests a feature that only this runtime has")
    config.addinivalue_line("markers", "emulated_tpu: tests what only runtimes that emulate a TPU have")
    config.addinivalue_line("markers", "torch_xla(why): tests what TorchTPU does not have; `why` says what")
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        _prepare_process(config)
    if config.getoption("--polyxla-runtime") == "torchtpu":
        import polyxla_bridge

        # TorchTPU opens this library as soon as a test module imports torch.
        os.environ["TPU_LIBRARY_PATH"] = str(polyxla_bridge.LIBRARY)
        if CALLS not in os.environ:
            # Workers of pytest-xdist inherit the controller's.
            os.environ[CALLS] = tempfile.mkdtemp(prefix="polyxla-calls-")
            # Exit functions run in reverse order, and those of TorchTPU still write there.
            atexit.register(shutil.rmtree, os.environ[CALLS])
        # TorchTPU reads this attribute of each tensor whose value it reads.
        leaf = "The .grad attribute of a Tensor that is not a leaf"
        config.addinivalue_line("filterwarnings", f"ignore:{leaf}:UserWarning")


CALLS = "POLYXLA_BRIDGE_CALLS"


def _prepare_process(config: pytest.Config) -> None:
    """Prepare a process for this session, from which the programs and replicas of its tests start.

    Each would otherwise import torch_xla anew, which takes longer than most of them. Where a test has other
    variables, they start cold. A process that the developer has prepared is used as it is.
    """
    if find_sockets(os.environ):
        return
    directory = tempfile.mkdtemp(prefix="polyxla-warm-")
    # Workers of pytest-xdist inherit it, and so do the programs that tests start.
    os.environ["XDG_RUNTIME_DIR"] = directory
    command = [sys.executable, "-m", "polyxla", "warm"]
    runtime: str = config.getoption("--polyxla-runtime")
    node = {"XRT_TPU_CONFIG": "localservice;0;localhost:8470", "TPU_NUM_DEVICES": "1"}
    variables = {**os.environ, **{"pjrt": {"PJRT_DEVICE": "CPU"}, "xrt": node}.get(runtime, {})}
    starting = subprocess.Popen([*command, "on", "--runtime", runtime], env=variables)

    def end() -> None:
        starting.wait(READY_S)
        subprocess.run([*command, "off"], check=False)
        shutil.rmtree(directory)

    config.add_cleanup(end)


@pytest.fixture(scope="session", autouse=True)
def _process_is_ready(_device_first: None) -> None:
    """Wait for the prepared process, which is imported while this one collects tests and opens its device."""
    wait_until(lambda: bool(find_sockets(os.environ)), "the prepared process is ready", READY_S)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """List the functions of PJRT's table that TorchTPU has called, and fail if one is missing."""
    if hasattr(session.config, "workerinput") or CALLS not in os.environ:
        return
    from polyxla_bridge.table.table import recorded

    called, missing = recorded(Path(os.environ[CALLS]))
    print(f"\nTorchTPU called {len(called)} functions of PJRT in Python: {', '.join(sorted(called))}")
    if missing:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        # After the summary, which counts tests only and ends with "passed".
        reason = f"FAILED: the bridge lacks what TorchTPU called: {', '.join(sorted(missing))}"
        session.config.add_cleanup(lambda: print(reason))


# Directories of tests that run on one of the other runtimes only.
OWN_TESTS = {"xrt": "jobs", "torchtpu": "torchtpu"}
# Files beside this one that import torch_xla, and whose subject does not depend on the runtime.
WITHOUT_TORCH_XLA = ("test_docs.py", "test_page_blocks.py", "test_bad_input.py", "jobs", "clients", "seeds")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what cannot be imported beside TorchTPU."""
    if config.getoption("--polyxla-runtime") == "torchtpu":
        is_beside = collection_path.parent == Path(__file__).parent
        return True if is_beside and collection_path.name in WITHOUT_TORCH_XLA else None
    return True if collection_path.name == "torchtpu" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that do not depend on the runtime, except on the first runtime, pjrt."""
    runtime: str = config.getoption("--polyxla-runtime")
    is_first = runtime == "pjrt"
    # Whole jobs on workers, and programs for TorchTPU: tests of one other runtime each.
    others = {name: Path(__file__).parent / directory for name, directory in OWN_TESTS.items()}
    own = others.get(runtime)
    if is_first:
        selected = [item for item in items if not {*others.values()} & {*item.path.parents}]
    else:
        selected = [item for item in items if own in item.path.parents or _depends_on_runtime(item, runtime)]
    if runtime == "torchtpu":
        selected = [item for item in selected if not item.get_closest_marker("torch_xla")]
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = selected


def _depends_on_runtime(item: pytest.Item, runtime: str) -> bool:
    if item.get_closest_marker("pjrt"):
        return False
    if item.get_closest_marker("emulated_tpu"):
        return runtime == "torchtpu"
    return "runtime" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session", autouse=True)
def _device_first(pytestconfig: pytest.Config) -> None:
    """Touch the device before any test computes gradients: torch's autograd engine counts devices once."""
    runtime = pytestconfig.getoption("--polyxla-runtime")
    if runtime == "torchtpu":
        _load_torch_tpu()
        return
    is_node = runtime == "xrt"
    # The import of torch_xla sets variables that the tests must not see.
    with temporary_environ(
        {**os.environ, **(_node_of_this_process() if is_node else {"PJRT_DEVICE": "CPU"})}
    ):
        import torch_xla

        torch_xla.device()


def _load_torch_tpu() -> None:
    """Load TorchTPU in this process, for the replicas that run inline."""
    from polyxla_torchtpu.plan import plan_cpu

    with temporary_environ(plan_cpu(1).process_environments(os.environ, 1)[0]):
        import torch

        from polyxla_torchtpu.framework import load_in_replica

        load_in_replica()
        torch.zeros((), device="tpu").cpu()


def _node_of_this_process() -> dict[str, str]:
    """Return the variables of a node for this whole process: replicas that run inline use it."""
    from polyxla.plugin import free_ports
    from polyxla_xrt.config.configuration import read_configuration
    from polyxla_xrt.plan import requested_plan

    environ = {"XRT_TPU_CONFIG": f"localservice;0;localhost:{free_ports(1)[0]}", "TPU_NUM_DEVICES": "1"}
    configuration = read_configuration(environ)
    assert configuration is not None
    return environ | requested_plan(configuration, environ).program_environment(environ)


@pytest.fixture(scope="session")
def runtime(
    runtime: RuntimeUnderTest, chosen_worker: tuple[list[str], dict[str, str]]
) -> Iterator[RuntimeUnderTest]:
    """The runtime under test; for xrt with a worker that its replicas run on."""
    if runtime.name != "xrt":
        yield runtime
        return
    with _worker(CORES, *chosen_worker) as served:
        node = {"XRT_TPU_CONFIG": f"tpu_worker;0;{served['address']}"}
        if served["devices"] != CORES:
            node["TPU_NUM_DEVICES"] = str(served["devices"])
        with temporary_environ(os.environ | node):
            yield runtime


@pytest.fixture(scope="session")
def check_mnist() -> Callable[[str, range], None]:
    """Checks what the replicas with these ordinals have printed in the seeds' multi-device MNIST."""

    def check(output: str, ordinals: range) -> None:
        found = re.findall(r"ordinal (\d+) steps (\d+) first (\S+) last (\S+)", output)
        assert sorted(int(ordinal) for ordinal, *_ in found) == list(ordinals)
        for _, steps, first, last in found:
            assert steps == "10"
            # All images and labels are equal, so the loss can only fall.
            assert float(last) < float(first)

    return check


@pytest.fixture(scope="session")
def chosen_worker(pytestconfig: pytest.Config) -> tuple[list[str], dict[str, str]]:
    """The options and the variables of the workers that ``--xrt-worker`` chooses."""
    words = shlex.split(pytestconfig.getoption("--xrt-worker"))
    variables = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    return words[len(variables) :], dict(variable.split("=", 1) for variable in variables)


@contextmanager
def _worker(cores: int, options: list[str], variables: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Serve cores on a free port, as from another terminal; yield the worker's own description."""
    command = ["polyxla", "worker", "--address", "127.0.0.1:0", "--devices", str(cores), "--json", *options]
    environ = {**os.environ, **variables}
    worker = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, env=environ
    )
    assert worker.stdout is not None
    try:
        lines = iter(worker.stdout.readline, "")
        yield json.loads("".join(_until("}", lines)))
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
    """The environment without the variables that choose or configure a runtime."""
    chooses = ("PJRT_", "XRT_", "TPU_", "POLYXLA_", "CPU_NUM_DEVICES", "TORCHELASTIC_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(chooses)}
    kept = {name: os.environ[name] for name in (CALLS,) if name in os.environ}
    return clean | kept | {"POLYXLA_COMPILE_CACHE": "off"}


@pytest.fixture
def require_layout(runtime: RuntimeUnderTest) -> Callable[[int, int], None]:
    """Skip a layout in which replicas share processes, if the runtime has a process for each."""

    def require(count: int, processes: int) -> None:
        if runtime.name != "pjrt" and processes != count:
            pytest.skip("on this runtime each replica is a process")

    return require


@pytest.fixture
def everywhere(
    request: pytest.FixtureRequest,
    runtime: RuntimeUnderTest,
    require_layout: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., list[Any]]:
    """Run ``function(replica, *args)`` in every replica of one layout, and check that it is that layout.

    Parametrized indirectly with the number of replicas and of the processes that share them.
    """
    count, processes = request.param
    require_layout(count, processes)
    monkeypatch.setenv("POLYXLA_PJRT_PROCESSES", str(processes))

    def launch(function: Callable[..., Any], *args: Any) -> list[Any]:
        # A process even for one replica: torch.distributed leaves state behind, which ends with the process.
        start = "spawn" if count == 1 else "auto"
        answers = runtime.launch(_with_layout, function, *args, devices=count, start_method=start)
        assert [layout for layout, _ in answers] == [(count, processes)] * count
        return [result for _, result in answers]

    return launch


def _with_layout(replica: Replica, function: Callable[..., Any], *args: Any) -> Any:
    return (replica.world_size, replica.world.process_count), function(replica, *args)


@pytest.fixture(scope="session")
def train_on_cpu() -> Callable[..., list[float]]:
    """Returns the losses that a program prints on the CPU, in one process or in several; it runs once."""

    @functools.cache
    def losses(program: Path, *arguments: str, processes: int = 1) -> list[float]:
        launcher = _torchrun(processes) if processes > 1 else []
        return _losses([sys.executable, *launcher, str(program), *arguments], None)

    return losses


@pytest.fixture
def train_on_tpu(clean_environ: dict[str, str]) -> Callable[..., list[float]]:
    """Returns the losses that a program prints on an emulated TPU; torchrun starts several processes.

    Unless `launcher` does, the words between Python and the program.
    """

    def run(
        tpu: str, devices: int, program: Path, *arguments: str, launcher: Sequence[str] = ()
    ) -> list[float]:
        # `polyxla run` starts from the prepared process.
        usual = _torchrun(devices) if devices > 1 else ["-m", "polyxla", "run", "--runtime", "torchtpu"]
        command = [sys.executable, *(launcher or usual), str(program), *arguments]
        return _losses(command, {**clean_environ, "POLYXLA_EMULATE": tpu})

    return run


def _torchrun(processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]


def _losses(command: list[str], environ: dict[str, str] | None) -> list[float]:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss ")]
    assert losses, done.stdout
    return losses
