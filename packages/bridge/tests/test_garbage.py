"""Collections of garbage while TorchTPU computes, in processes without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, sys, time
from polyxla_bridge import torch_tpu_opener

torch_tpu_opener.REST = float(sys.argv[1])
gc.set_threshold(50, 1, 1)
torch_tpu_opener.only_in_main_thread()
generations, kept = [], []
gc.callbacks.append(lambda phase, info: phase == "start" and generations.append(info["generation"]))
deadline = time.monotonic() + 30
while len(generations) < 40 and time.monotonic() < deadline:
    kept.extend([] for _ in range(100))
    time.sleep(0.01)
print(len(generations), generations.count(2))
"""


@pytest.mark.parametrize(("rest", "oldest"), [("0", range(2, 40)), ("1e9", [1])])
def test_collections_of_all_objects_rest(rest: str, oldest: range | list[int]) -> None:
    every, of_all = map(
        int, subprocess.check_output([sys.executable, "-c", PROGRAM, rest], timeout=60).split()
    )
    assert every >= 40
    assert of_all in oldest
