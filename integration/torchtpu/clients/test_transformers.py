"""Programs of Accelerate and transformers, without polyxla's name in them, train as on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
LLAMA = PROGRAMS / "llama.py"
LOOP = PROGRAMS / "accelerate_loop.py"
TRAINER = PROGRAMS / "trainer.py"
STEPS = 20
PROCESSES = 4
EACH = ("-m", "polyxla", "run", "--runtime", "torchtpu", "--each")
ACCELERATE = ("-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", str(PROCESSES))
TOLERANCE = 1e-5
# Each program has a limit of its own, and some tests run three.
pytestmark = pytest.mark.timeout(800)


@pytest.fixture(scope="session")
def on_cpu(
    train_on_cpu: Callable[..., list[float]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[float]]:
    """Returns the losses that a program prints in several processes on the CPU; it runs once."""
    directory = tmp_path_factory.mktemp("cpu")

    def losses(program: Path, *options: str, processes: int = PROCESSES) -> list[float]:
        return train_on_cpu(program, str(directory), *options, "cpu", processes=processes)

    return losses


@pytest.mark.parametrize(("strategy", "devices"), [("none", 1), ("ddp", 4), ("tp", 4)])
def test_a_llama_of_transformers_trains_as_on_the_cpu(
    train_on_tpu: Callable[..., list[float]],
    train_on_cpu: Callable[..., list[float]],
    strategy: str,
    devices: int,
) -> None:
    expected = train_on_cpu(LLAMA, "none", "cpu")
    assert len(expected) == STEPS
    found = train_on_tpu(f"v5e-{devices}", devices, LLAMA, strategy)
    assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def test_a_loop_of_accelerate_trains_and_resumes_as_on_the_cpu(
    train_on_tpu: Callable[..., list[float]], on_cpu: Callable[..., list[float]], tmp_path: Path
) -> None:
    expected = on_cpu(LOOP)
    # The last number is the share of test data that are classified wrongly.
    assert len(expected) == STEPS + 1
    whole = train_on_tpu("v4-8", PROCESSES, LOOP, str(tmp_path))
    assert whole == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    resumed = train_on_tpu("v4-8", PROCESSES, LOOP, str(tmp_path), "resume", launcher=EACH)
    assert resumed == pytest.approx(whole[STEPS // 2 :], rel=TOLERANCE, abs=TOLERANCE)


def test_a_loop_of_accelerate_trains_on_one_device(
    train_on_tpu: Callable[..., list[float]], on_cpu: Callable[..., list[float]], tmp_path: Path
) -> None:
    expected = on_cpu(LOOP, processes=1)
    found = train_on_tpu("v5e-1", 1, LOOP, str(tmp_path))
    assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        pytest.param(("gpt2",), TOLERANCE, id="tied"),
        pytest.param(("llama",), TOLERANCE, id="untied"),
        pytest.param(("llama", "bf16"), 1e-3, id="bf16"),
    ],
)
def test_the_trainer_of_transformers_trains_as_on_the_cpu(
    train_on_tpu: Callable[..., list[float]],
    on_cpu: Callable[..., list[float]],
    tmp_path: Path,
    options: tuple[str, ...],
    tolerance: float,
) -> None:
    expected = on_cpu(TRAINER, *options)
    # The last number is the loss of the test data.
    assert len(expected) == STEPS + 1
    found = train_on_tpu("v4-8", PROCESSES, TRAINER, str(tmp_path), *options)
    assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_the_trainer_of_transformers_shards_as_it_trains_on_the_cpu(
    train_on_tpu: Callable[..., list[float]], on_cpu: Callable[..., list[float]], tmp_path: Path
) -> None:
    # FSDP2 divides the parameters; on the CPU, DistributedDataParallel keeps them whole.
    expected = on_cpu(TRAINER, "llama")
    options = (TRAINER, str(tmp_path), "llama", "fsdp")
    whole = train_on_tpu("v4-8", PROCESSES, *options)
    assert whole == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    resumed = train_on_tpu("v4-8", PROCESSES, *options, "resume")
    assert resumed == pytest.approx(whole[STEPS // 2 :], rel=TOLERANCE, abs=TOLERANCE)


def test_the_trainer_of_transformers_resumes_with_the_dropout_of_an_uninterrupted_run(
    train_on_tpu: Callable[..., list[float]], on_cpu: Callable[..., list[float]], tmp_path: Path
) -> None:
    options = (TRAINER, str(tmp_path), "gpt2", "dropout")
    whole = train_on_tpu("v4-8", PROCESSES, *options, launcher=ACCELERATE)
    assert len(whole) == STEPS + 1
    assert whole != pytest.approx(on_cpu(TRAINER, "gpt2"), rel=TOLERANCE, abs=TOLERANCE)
    resumed = train_on_tpu("v4-8", PROCESSES, *options, "resume", launcher=EACH)
    assert resumed == pytest.approx(whole[STEPS // 2 :], rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("script", ["test_ops", "test_script", "test_sync"])
def test_a_script_with_which_accelerate_tests_itself_passes(
    script: str, clean_environ: dict[str, str]
) -> None:
    # Some of their checks are for two processes.
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *torchrun, "-m", f"accelerate.test_utils.scripts.{script}"]
    environ = {**clean_environ, "POLYXLA_EMULATE": "v4-8"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
