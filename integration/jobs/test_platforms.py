"""Jobs on workers whose cores are a PJRT plugin's devices, or an emulated TPU's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from polyxla.plugin import free_ports

if TYPE_CHECKING:
    from jobs.conftest import Host, Served

Launch = Callable[..., subprocess.Popen[str]]
Serve = Callable[..., Any]
PATIENCE_S = 240
SEEDS = Path(__file__).parents[1] / "seeds"
each_emulated = pytest.mark.parametrize(("kind", "cores"), [("v3-8", 8), ("v4-8", 4)])
DIGITS = ("-m", "polyxla_examples.digits", "--json")


def on_plugin(serve: Serve, host: Host, cores: int) -> Served:
    package = pytest.importorskip("lammps_jax_pjrt_cpu", reason="has wheels for x86_64 only")
    options = ("--platform", f"plugin={package.PLUGIN_PATH}", "--plugin-option", f"cpu_device_count={cores}")
    served: Served = serve(host, cores, platform=options)
    return served


def on_emulated(serve: Serve, host: Host, kind: str, cores: int) -> Served:
    served: Served = serve(host, cores, platform=("--platform", "tpu"), POLYXLA_EMULATE=kind)
    return served


def printed(job: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, err
    return out, err


def variables(served: Served, cores: int) -> dict[str, str]:
    return {"XRT_TPU_CONFIG": f"tpu_worker;0;{served.address}", "TPU_NUM_DEVICES": str(cores)}


def test_a_plain_script_runs_on_a_plugin(serve: Serve, launch: Launch, here: Host) -> None:
    environ = variables(on_plugin(serve, here, 8), 8)
    out, _ = printed(launch(here, str(SEEDS / "all_reduce.py"), **environ))
    assert sorted(out.splitlines()) == [f"ordinal {ordinal} of 8 sum 28.0" for ordinal in range(8)]


@pytest.mark.parametrize("asked", [pytest.param(1, marks=pytest.mark.long), 4])
def test_localservice_on_a_tpu_host_serves_its_chips(launch: Launch, here: Host, asked: int) -> None:
    (port,) = free_ports(1)
    environ = {
        "POLYXLA_EMULATE": "v4-8",
        "POLYXLA_RUNTIME": "xrt",
        "XRT_TPU_CONFIG": f"localservice;0;localhost:{port}",
        "TPU_NUM_DEVICES": str(asked),
    }
    out, err = printed(launch(here, str(SEEDS / "all_reduce.py"), **environ))
    total = sum(range(asked))
    assert sorted(out.splitlines()) == [
        f"ordinal {ordinal} of {asked} sum {total:.1f}" for ordinal in range(asked)
    ]
    assert f"started a worker of this host's TPU cores at localhost:{port}" in err


@pytest.mark.long
def test_digits_trains_on_a_plugin(serve: Serve, launch: Launch, here: Host) -> None:
    environ = variables(on_plugin(serve, here, 8), 8)
    out, _ = printed(launch(here, "-m", "polyxla", "run", *DIGITS, **environ))
    assert json.loads(out)["test_accuracy"] > 0.97


@pytest.mark.long
@each_emulated
def test_digits_trains_on_an_emulated_tpu(
    serve: Serve, launch: Launch, here: Host, kind: str, cores: int
) -> None:
    served = on_emulated(serve, here, kind, cores)
    assert served.status()["platform"] == "tpu"
    out, _ = printed(launch(here, "-m", "polyxla", "run", *DIGITS, **variables(served, cores)))
    assert json.loads(out)["test_accuracy"] > 0.97


def run_mnist(served: Served, launch: Launch, cores: int) -> str:
    command = ("-m", "polyxla", "run", str(SEEDS / "mnist_multi.py"), str(1280 * cores))
    return printed(launch(served.host, *command, **variables(served, cores)))[0]


@pytest.mark.long
def test_multi_device_mnist_runs_on_a_plugin(
    serve: Serve, launch: Launch, here: Host, check_mnist: Callable[[str, range], None]
) -> None:
    check_mnist(run_mnist(on_plugin(serve, here, 8), launch, 8), range(8))


@pytest.mark.long
@each_emulated
def test_multi_device_mnist_runs_on_an_emulated_tpu(
    serve: Serve,
    launch: Launch,
    here: Host,
    kind: str,
    cores: int,
    check_mnist: Callable[[str, range], None],
) -> None:
    check_mnist(run_mnist(on_emulated(serve, here, kind, cores), launch, cores), range(cores))
