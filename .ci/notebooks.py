#!/usr/bin/env python3
"""Run the cells of the tutorials in a kernel, each in an empty directory; fail at a cell that raises.

The argument is the framework that is installed here, torch_xla or torch_tpu. `polyxla` must be on PATH, as it
is in a session of nox. Each cell has a deadline.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIALS = Path(__file__).resolve().parent.parent / "docs" / "tutorials"
ON_TORCH_TPU = {"torchtpu-in-ci"}
CELL_TIMEOUT_S = 280


def run(path: Path) -> None:
    """Run one notebook, and print how long it took.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised; the message has its code and its traceback.
        nbclient.exceptions.CellTimeoutError: a cell did not end in time.
    """
    started = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as directory:
        where = {"metadata": {"path": directory}}
        NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources=where).execute()
    print(f"{path.stem}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    every = {path.stem for path in TUTORIALS.glob("*.ipynb")}
    names = ON_TORCH_TPU if sys.argv[1] == "torch_tpu" else every - ON_TORCH_TPU
    for name in sorted(names):
        run(TUTORIALS / f"{name}.ipynb")
