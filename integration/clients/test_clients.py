"""Programs of Lightning, Accelerate and transformers train on emulated TPUs as on one CPU process.

None of them imports polyxla. The programs work around what fails on any TPU, with a link.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polyxla.replica.other_names import OTHER_NAMES

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 500
EPOCHS = 6
ACCURACY = 0.94
REPLICAS = {"v4-8": 4, "v3-8": 8}
ACCELERATE = ("-m", "accelerate.commands.launch", "--tpu", "--main_training_function", "main")


@dataclass(frozen=True)
class Client:
    """A program, and how its users start it.

    Attributes:
        program: its file.
        on_cpu: arguments for one process on the CPU.
        on_tpu: arguments on a TPU host.
        launcher: the words before the program on a TPU host.
        checkpoint: name of the checkpoint after half of the training.
    """

    program: str
    on_cpu: tuple[str, ...] = ()
    on_tpu: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    checkpoint: str = f"epoch={EPOCHS // 2 - 1}.ckpt"

    def run(self, environ: dict[str, str], directory: Path, *arguments: str) -> dict[str, Any]:
        """Run the program, and return the result that it prints."""
        is_tpu = "POLYXLA_EMULATE" in environ
        command = [*(self.launcher if is_tpu else ()), str(PROGRAMS / self.program)]
        command += [*(self.on_tpu if is_tpu else self.on_cpu), "--dir", str(directory), *arguments]
        done = subprocess.run(
            [sys.executable, *command, "--epochs", str(EPOCHS)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
        return result


ONE_CPU, ALL_CORES = ("--accelerator", "cpu", "--devices", "1"), ("--accelerator", "tpu")
CLIENTS = (
    Client("lightning_trainer.py", ONE_CPU, ALL_CORES),
    Client("lightning_fabric.py", ONE_CPU, ALL_CORES),
    Client("accelerate_loop.py", launcher=ACCELERATE, checkpoint=f"epoch={EPOCHS // 2 - 1}"),
    Client("transformers_trainer.py", checkpoint="checkpoint-48"),
)


_on_cpu: dict[str, dict[str, Any]] = {}
"""The result that each program printed on one CPU process, by its file."""


@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize(
    ("client", "kind"),
    [
        pytest.param(client, kind, marks=pytest.mark.xdist_group(client.program), id=f"{name}-{kind}")
        for client in CLIENTS
        for name in [client.program.removesuffix(".py")]
        for kind in REPLICAS
    ],
)
def test_a_client_trains_and_resumes_on_an_emulated_tpu(
    client: Client, kind: str, clean_environ: dict[str, str], tmp_path: Path
) -> None:
    if client.program not in _on_cpu:
        # Accelerate and transformers use an XLA device, also on the CPU, unless they are told not to.
        _on_cpu[client.program] = client.run({**clean_environ, "USE_TORCH_XLA": "0"}, tmp_path / "cpu")
    on_cpu = _on_cpu[client.program]
    environ = {**clean_environ, "POLYXLA_EMULATE": kind}
    whole = client.run(environ, tmp_path / "whole")
    assert (whole["world_size"], whole["device"]) == (REPLICAS[kind], "xla")
    assert (whole["first_step"], whole["steps"]) == (0, on_cpu["steps"])
    assert on_cpu["accuracy"] >= ACCURACY
    assert whole["accuracy"] == pytest.approx(on_cpu["accuracy"], abs=0.02)
    assert whole["weight"] == pytest.approx(on_cpu["weight"], rel=1e-3)
    resumed = client.run(
        environ, tmp_path / "resumed", "--resume", str(tmp_path / "whole" / client.checkpoint)
    )
    # The resumed run ends as if it had never stopped.
    assert resumed.pop("weight") == pytest.approx(whole.pop("weight"), rel=1e-4)
    assert resumed == {**whole, "first_step": whole["steps"] // 2}


def test_each_name_of_accelerates_that_an_error_explains_exists_there() -> None:
    from accelerate import Accelerator
    from lightning.fabric import Fabric

    names = {name for name in OTHER_NAMES if not hasattr(Fabric, name)}
    assert names, "the names of Accelerate's"
    # `sync_gradients` and the like are set in its objects.
    assert [name for name in sorted(names) if not hasattr(Accelerator, name)] == []
