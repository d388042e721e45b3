"""One replica on torch_xla's own clients, in fresh processes; on a TPU up to loading libtpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyxla import launch
from polyxla.launcher.launch import run_replica
from polyxla.plugin import Job, Setting
from polyxla_pjrt import env, plugin
from polyxla_pjrt.discovery import discover
from polyxla_pjrt.plan import replica_environment

TIMEOUT_S = 120


def describe(replica: object) -> tuple[str, str, int]:
    return replica.kind, str(replica.device), os.getpid()  # type: ignore[attr-defined]


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, so that the tests' process never starts a runtime."""
    chooses = ("PJRT_", "CPU_NUM", "POLYXLA_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(chooses)}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**clean, **environ}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.long
def test_a_spawned_replica_runs_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CPU_NUM_DEVICES, "8")
    [(kind, device, pid)] = launch(describe, runtime="pjrt", devices=[5], start_method="spawn")
    assert (kind, device) == ("CPU", "xla:5")
    assert pid != os.getpid()


def test_an_inline_replica_can_be_launched_twice_and_leaves_no_variable() -> None:
    done = python(
        "import os, polyxla\n"
        "def device(replica): return str(replica.device), os.environ['PJRT_DEVICE']\n"
        "print(polyxla.launch(device), polyxla.launch(device))\n"
        "print([name for name in os.environ if name.startswith(('PJRT_DEVICE', 'POLYXLA'))])\n"
    )
    assert done.stdout.splitlines() == ["[('xla:0', 'CPU')] [('xla:0', 'CPU')]", "[]"], done.stderr
    assert done.stderr.count("polyxla: runtime pjrt: the CPU") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("requested", "count"),
    [({"POLYXLA_COMPILE_CACHE": "/mine"}, 1), ({"POLYXLA_COMPILE_CACHE": "off"}, 0)],
)
def test_a_requested_compile_cache_is_reported_as_unused_with_one_replica(
    requested: dict[str, str], count: int
) -> None:
    environ = {"PJRT_DEVICE": "CPU", **requested}
    done = python(
        "import polyxla, torch_xla\n"
        "def nothing(replica): pass\n"
        "polyxla.launch(nothing), polyxla.launch(nothing)\n",
        **environ,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("POLYXLA_COMPILE_CACHE=/mine: no compiled programs are cached here") == count
    assert done.stderr.count("no compiled programs") == count


def test_a_device_that_the_running_client_does_not_have_is_refused() -> None:
    done = python(
        "import os, polyxla\n"
        "def device(replica): return str(replica.device)\n"
        "polyxla.launch(device)\n"
        "os.environ['CPU_NUM_DEVICES'] = '4'\n"
        "try: polyxla.launch(device, devices=[3])\n"
        "except polyxla.UsageError as error: print(error)\n"
    )
    assert "device 3 is not among the 1 that torch_xla already runs with in this process" in done.stdout
    assert "start_method='spawn'" in done.stdout


@pytest.mark.long
def test_a_process_that_called_backward_before_it_had_the_device_is_refused() -> None:
    done = python(
        "import polyxla, torch\n"
        "torch.ones(3, requires_grad=True).sum().backward()\n"
        "def train(replica):\n"
        "    torch.ones(3, device=replica.device, requires_grad=True).sum().backward()\n"
        "    return 'trained'\n"
        "try: polyxla.launch(train)\n"
        "except polyxla.UsageError as error: print(error)\n"
        "print(polyxla.launch(train, start_method='forkserver'))\n"
    )
    assert "this process called backward() before it had xla:0" in done.stdout, done.stderr
    assert done.stdout.endswith("['trained']\n")


def test_a_process_that_runs_on_another_device_type_is_refused() -> None:
    done = python(
        "import torch_xla; torch_xla.device()\n"
        "from polyxla_pjrt.replication import SingleReplication\n"
        "try: SingleReplication('TPU', 0, {})\n"
        "except Exception as error: print(error)\n",
        PJRT_DEVICE="CPU",
    )
    assert "torch_xla already runs on CPU in this process, and cannot change to TPU" in done.stdout


@pytest.mark.long
def test_a_fork_of_a_process_that_uses_a_device_is_refused_with_the_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import polyxla, torch_xla\n"
        "torch_xla.device()\n"
        "try: polyxla.launch(print, devices=2, start_method='fork')\n"
        "except polyxla.UsageError as error: print(error)\n"
    )
    done = python(f"import runpy; runpy.run_path({str(script)!r})", PJRT_DEVICE="CPU")
    assert done.stdout == (
        "launch was called in a process that already uses a device, initialized at "
        f"{script}:2 (from launch). Use devices only in the function that is launched.\n"
    ), done.stderr


@pytest.fixture
def tpu_host(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return a v4 host's PCI devices, and its environment."""
    for index in range(4):
        device = tmp_path / "pci" / f"0000:00:{index:02x}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0")
        (device / "device").write_text("0x005e")
    library = str(tmp_path / "libtpu.so")
    described = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-8", "TPU_LIBRARY_PATH": library}
    return tmp_path / "pci", {**os.environ, **described}


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param((2,), id="one"),
        pytest.param((0, 1), id="two", marks=pytest.mark.long),
        pytest.param((0, 1, 2, 3), id="all", marks=pytest.mark.long),
    ],
)
def test_a_tpu_job_runs_up_to_loading_libtpu(
    tpu_host: tuple[Path, dict[str, str]], devices: tuple[int, ...]
) -> None:
    pci, environ = tpu_host
    wanted = replica_environment(environ, discover(environ, "auto", pci), devices)
    job = Job(
        describe, (), "pjrt", devices, environ | wanted, Setting(None, "default"), "spawn", main=run_replica
    )
    with pytest.raises(RuntimeError, match=r"Failed to open .*libtpu\.so"):
        plugin.polyxla_launch(job)


@pytest.mark.slow
@pytest.mark.parametrize(("on_chips", "expected"), [(True, "False"), (False, "True")])
def test_a_process_on_tpu_chips_does_not_import_jax(on_chips: bool, expected: str) -> None:
    done = python(
        "import importlib, sys\n"
        "from polyxla_pjrt.launching import preload\n"
        f"for name in preload(on_chips={on_chips}): importlib.import_module(name)\n"
        "print('jax' in sys.modules)\n"
    )
    assert done.stdout == f"{expected}\n", done.stderr


def test_no_thread_that_copies_batches_fails_unnoticed() -> None:
    """To use JAX, several threads set and removed one variable: a thread failed, and the epoch ended."""
    program = Path(__file__).parent / "programs" / "copying_threads.py"
    done = python(program.read_text())
    lost = "error: a thread of torch_xla failed (see above), and the loop did not get all batches"
    lines = ["uses jax: False", lost, lost]
    assert done.stdout.splitlines() == lines, done.stderr
    assert done.stderr.count("KeyError: 'a variable'") == 2
