"""Trains torchtitan's debug model on emulated chips, and compares its losses with those on the CPU.

Usage: python .ci/titan_on_tpu.py DIVISION [OPTION ...]

The working directory is tests/assets of a checkout of torchtitan; the checkout's documentation is the text to
train on. OPTIONs are torchtitan's. DIVISION is the number of parts that they divide a batch into; on the CPU,
each is a process's, and nothing else is divided. With --checkpoint.interval, the training is repeated from
its first checkpoint. TITAN_FOLDER is where weights and losses are kept from one run to the next.

Each process of a training imports this module too: torchtitan calls what neither TorchTPU 0.2 nor a CPU has.
`teach` is all that is changed for both.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from polyxla.plugin import snapshot

STEPS = 10
CLOSE = 1e-5
OPTIONS = (
    "--module=llama3",
    "--config=llama3_debugmodel",
    f"--training.steps={STEPS}",
    "--training.seq_len=256",
    "--training.mixed_precision_param=float32",
    "--hf_assets_path=tokenizer",
    "--training.disable_cuda_graphs",
    "--debug.seed=1",
)
"""The debug model, with sequences that two cores can compute, and in a precision that can be compared."""
BATCH = 4
"""Sequences in a step, of all parts together."""


def main(division: int, options: Sequence[str]) -> int:
    """Train on chips and on the CPU; return the exit code."""
    folder = Path(snapshot()["TITAN_FOLDER"]).resolve()
    write_text(folder)
    seed = ("--checkpoint.enable", f"--checkpoint.initial_load_path={folder}/seed/checkpoint/step-0")
    if not (folder / "seed/checkpoint/step-0/.metadata").exists():
        train(folder / "seed", on_cpus(1), ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"])
    batch = f"--training.local_batch_size={BATCH // division}"
    expected = folder / f"cpu-{division}"
    if len(losses(expected)) < STEPS:
        train(expected, on_cpus(division), [batch, *seed, "--checkpoint.load_only"])
    output = folder / "chips"
    shutil.rmtree(output, ignore_errors=True)
    resumes = any(option.startswith("--checkpoint.interval") for option in options)
    arguments = [batch, *seed, *options, *([] if resumes else ["--checkpoint.load_only"])]
    train(output, ON_CHIPS, arguments)
    is_equal = compare(losses(output), losses(expected))
    if resumes:
        first = min((output / "checkpoint").iterdir(), key=lambda step: int(step.name.removeprefix("step-")))
        for path in output.glob("losses-*"):
            path.unlink()
        train(output, ON_CHIPS, [*arguments, f"--checkpoint.load_step={first.name.removeprefix('step-')}"])
        resumed = losses(output)
        is_equal &= 0 < len(resumed) < STEPS and compare(resumed, losses(expected))
    return not is_equal


def write_text(folder: Path) -> None:
    """Write a data set: the package is without torchtitan's, and a checkout may be."""
    pages = [path.read_text() for path in sorted(Path("../../docs").glob("*.md"))]
    texts = [text for page in pages for text in page.split("\n\n")]
    data = folder / "data/data.json"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if len(text) > 200))


ON_CHIPS: tuple[list[str], dict[str, str]] = (["polyxla", "run", "--each"], {})


def on_cpus(count: int) -> tuple[list[str], dict[str, str]]:
    """Return how to start processes on the CPU, and variables that keep TorchTPU out of them."""
    return [
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
    ], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "POLYXLA_EMULATE": ""}


def train(output: Path, start: tuple[list[str], dict[str, str]], options: Sequence[str]) -> None:
    """Train in processes that write their losses to `output`."""
    launcher, variables = start
    folder = output.parent
    own = {"TITAN_LOSSES": str(output), "HF_DATASETS_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
    output.mkdir(parents=True, exist_ok=True)
    where = (f"--dataloader.dataset_path={folder}/data", f"--dump_folder={output}")
    subprocess.run(
        [sys.executable, "-m", *launcher, __file__, *OPTIONS, *where, *options],
        env={**snapshot(), "OMP_NUM_THREADS": "1", **own, **variables},
        check=True,
    )


def losses(output: Path) -> dict[int, float]:
    """Read the losses of a training by step; where the model is divided in stages, one process knows them."""
    found: dict[int, float] = {}
    for path in output.glob("losses-*"):
        for line in path.read_text().splitlines():
            step, loss = json.loads(line)
            found[step] = max(loss, found.get(step, loss))
    return found


def compare(found: dict[int, float], expected: dict[int, float]) -> bool:
    """Print the losses, and return whether they are equal."""
    for step, loss in found.items():
        print(f"step {step}: {loss} on chips, {expected[step]} on the CPU")
    return STEPS in found and all(abs(loss - expected[step]) < CLOSE for step, loss in found.items())


class _Device:
    """What torchtitan asks a device's module for, of torch.accelerator or of nothing.

    TorchTPU 0.2's module lacks `memory_stats`, `reset_peak_memory_stats` and `empty_cache`, and refuses
    `device_count`, `current_device` and `synchronize` outside of torch. torch.cpu lacks most of them.
    """

    def __init__(self, torch: Any, name: str) -> None:
        self._torch, self._name = torch, name

    def __getattr__(self, name: str) -> Any:
        if self._name == "cpu":
            return lambda *_: {}
        return getattr(self._torch.accelerator, name, None) or getattr(self._torch.tpu, name)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        pass

    def get_device_name(self, device: object) -> str:
        return self._name

    def get_device_properties(self, device: object) -> Any:
        return SimpleNamespace(total_memory=2**34)


def teach() -> None:
    """Change torchtitan for the device of this process."""
    import torch
    from torch.nn.attention import flex_attention
    from torchtitan.tools import utils

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    utils.device_type = "cpu" if accelerator is None else accelerator.type
    utils.device_module = _Device(torch, utils.device_type)
    from torchtitan.distributed import compile as compiling
    from torchtitan.distributed import fsdp
    from torchtitan.models.common.attention import FlexAttention

    # torch knows no gradient of its compiled attention on a CPU, and no such attention on TorchTPU's device.
    # Not compiled, it computes both with other operators, but refuses to begin.
    FlexAttention._compiled_flex_attn = flex_attention.flex_attention  # noqa: SLF001
    flex_attention._validate_device = lambda *_: None  # noqa: SLF001
    # torchtitan refuses a backend that makes other operators of FlexAttention, as TorchTPU's does.
    compiling._maybe_regional_inductor_backend = lambda _, backend: backend  # noqa: SLF001
    divide_gradients = fsdp.disable_fsdp_gradient_division

    def sum_gradients(model: torch.nn.Module) -> None:
        divide_gradients(model)
        for module in model.modules():
            # Neither tpu_dist nor gloo has the PREMUL_SUM that FSDP2 would otherwise multiply by 1 with.
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = sum_gradients


def write_losses(file: Path) -> None:
    """Write each loss that torchtitan logs in this process."""
    from torchtitan.components.metrics import MetricsProcessor

    log = MetricsProcessor.log

    def write(self: MetricsProcessor, step: int, loss: float, *others: Any, **options: Any) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps([step, loss]) + "\n")
        log(self, step, loss, *others, **options)

    MetricsProcessor.log = write


if __name__ == "__main__":
    environ = snapshot()
    if "TITAN_LOSSES" not in environ:
        sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
    teach()
    write_losses(Path(environ["TITAN_LOSSES"], f"losses-{environ['RANK']}"))
    from torchtitan import train as program

    program.main()
