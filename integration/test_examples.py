"""The examples, run from the command line."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from polyxla_testing import RuntimeUnderTest
from polyxla_training import load

WAIT_S = 240


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


@pytest.mark.long
def test_weights_stay_tied(runtime: RuntimeUnderTest) -> None:
    result = last_line(runtime.run("--devices", "1", "-m", "polyxla_examples.weight_tying", "--json"))
    assert result == {"tied": True, "parameters": 50 * 32 + 32 * 32 + 32, "right": 1.0}


@pytest.mark.long
def test_a_language_model_learns_in_both_precisions(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("0123456789" * 4000)
    size = ["--text", str(text), "--steps", "120", "--width", "32", "--layers", "1", "--batch-size", "16"]
    precisions = ["--precision", "32-true", "--precision", "bf16-mixed"]
    done = runtime.run(
        "--devices", "1", "-m", "polyxla_examples.language_model", *precisions, *size, "--json"
    )
    assert done.returncode == 0, done.stderr
    full, mixed = (json.loads(line) for line in done.stdout.splitlines())
    assert [full["precision"], mixed["precision"]] == ["32-true", "bf16-mixed"]
    assert (full["replicas"], full["records_per_step"], full["steps"]) == (1, 16, 120)
    # Guessing one of ten digits at random has perplexity 10.
    assert full["perplexity"] == pytest.approx(2 ** full["bits_per_hidden_byte"])
    assert full["perplexity"] < 8
    assert mixed["bits_per_hidden_byte"] == pytest.approx(full["bits_per_hidden_byte"], rel=0.1)


def _kill_at(command: list[str], directory: Path, step: int, number: signal.Signals) -> str:
    """Run until there is a checkpoint of that step or a later one, send the signal, and return stderr."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + WAIT_S
    try:
        while not any(int(path.name[5:13]) >= step for path in directory.glob("step-*.safetensors")):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(number)
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == -number
        return err
    finally:
        process.kill()
        process.wait()


def _run(runtime: RuntimeUnderTest, module: str, *arguments: str) -> list[str]:
    run = [sys.executable, "-m", "polyxla", "run", "--runtime", runtime.name, "--devices", "1", "-m"]
    return [*run, f"polyxla_examples.{module}", "--json", *arguments]


# An epoch has 44 steps: of two kills, the first is in the first epoch, the second in the second.
@pytest.mark.parametrize(
    ("epochs", "kills"),
    [pytest.param(2, (15, 55), id="twice"), pytest.param(1, (25,), id="once")],
)
@pytest.mark.long
def test_digits_killed_in_mid_epoch_resumes_to_the_same_bits(
    runtime: RuntimeUnderTest, tmp_path: Path, epochs: int, kills: tuple[int, ...]
) -> None:
    def command(directory: Path) -> list[str]:
        options = ["--epochs", str(epochs), "--save-every", "5", "--checkpoint-dir", str(directory)]
        return _run(runtime, "digits", *options)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(command(whole), check=True, capture_output=True, timeout=WAIT_S)
    said = [_kill_at(command(broken), broken, step, signal.SIGKILL) for step in kills]
    done = subprocess.run(command(broken), check=True, capture_output=True, text=True, timeout=WAIT_S)
    # The seeded example would compute the same numbers if it began again.
    resumed = f"resumed from {broken}/step-"
    assert [resumed in err for err in (*said, done.stderr)] == [False, *(True for _ in kills)]
    expected, found = (
        load(directory / f"step-{44 * epochs:08}.safetensors") for directory in (whole, broken)
    )
    for part in ("module", "schedules"):
        assert found[part].keys() == expected[part].keys()
    assert all(torch.equal(found["module"][name], value) for name, value in expected["module"].items())
    states = expected["optimizer"]["state"]
    assert all(
        torch.equal(found["optimizer"]["state"][key][name], value)
        for key, state in states.items()
        for name, value in state.items()
    )


@pytest.mark.long
def test_a_resumed_run_draws_the_same_numbers(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def command(directory: Path) -> list[str]:
        return _run(runtime, "resume", "--epochs", "4", "--checkpoint-dir", str(directory))

    def run(directory: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(directory), check=False, capture_output=True, text=True, timeout=WAIT_S)

    expected = last_line(run(whole))
    _kill_at(command(broken), broken, 70, signal.SIGTERM)
    saved = max(int(path.name[5:13]) for path in broken.glob("step-*.safetensors"))
    done = run(broken)
    found = last_line(done)
    assert 70 <= saved < 200
    assert f"resumed from {broken}/step-{saved:08}" in done.stderr
    assert found == expected
    assert math.isfinite(found["checksum"])
