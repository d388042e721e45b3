"""All-reduce on two hosts, until the end of the job or of ten steps; each replica writes its step.

``raise`` raises in the last replica after three steps, with ``once`` in the first run only; ``end`` ends
after ten steps.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


def train(index: int, words: list[str]) -> None:
    directory, device = Path(os.environ["POD_TEST"]), torch_xla.device()
    is_last = xr.global_ordinal() == xr.world_size() - 1
    again = (directory / "raised").exists()
    for step in range(1_000_000 if not words else 10):
        total: Any = xm.all_reduce(xm.REDUCE_SUM, torch.ones(2, device=device))
        assert total.cpu().tolist() == [xr.world_size()] * 2
        (directory / f"ordinal-{xr.global_ordinal()}").write_text(str(step))
        if "raise" in words and step == 3 and is_last and not ("once" in words and again):
            (directory / "raised").touch()
            raise ValueError("no more records")
        time.sleep(0.05)


if __name__ == "__main__":
    torch_xla.launch(train, args=(sys.argv[1:],))
