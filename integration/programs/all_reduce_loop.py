"""All-reduce for STEPS steps; write checkpoints, and each replica's step and process id, into DIRECTORY."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


def train(index: int, directory: str, steps: int) -> None:
    device, ordinal = torch_xla.device(), xr.global_ordinal()
    weight = torch.zeros(4, device=device)
    for step in range(steps):
        ones: Any = xm.all_reduce("sum", torch.ones(4, device=device))
        weight += ones
        torch_xla.sync()
        if ordinal == 0:
            torch.save({"step": step, "weight": weight.cpu()}, f"{directory}/new")
            Path(directory, "new").replace(Path(directory, "checkpoint"))
        Path(directory, f"ordinal-{ordinal}").write_text(f"{step} {os.getpid()}")


if __name__ == "__main__":
    torch_xla.launch(train, args=(sys.argv[1], int(sys.argv[2])))
    print("DONE")
