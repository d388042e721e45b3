#!/usr/bin/env python3
"""Run the documentation's code in kernels, each in an empty directory; fail at a cell that raises.

    notebooks.py torch_xla|torch_tpu [--save]  the tutorials for the framework that is installed here
    notebooks.py pages [NAME ...]              the blocks of the pages, which are for torch_xla; all, or some

With ``--save`` the tutorials keep what their cells have printed, so that the site shows it.

`polyxla` must be on PATH, as it is in a session of nox. Each cell has a deadline.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path

import blocks
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal

TUTORIALS = Path(__file__).resolve().parent.parent / "docs" / "tutorials"
ON_TORCH_TPU = {"torchtpu-in-ci"}
CELL_TIMEOUT_S = 280


def run(name: str, notebook: nbformat.NotebookNode) -> None:
    """Run one notebook, and print how long it took.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised; the message has its code and its traceback.
        nbclient.exceptions.CellTimeoutError: a cell did not end in time.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        where = {"metadata": {"path": directory}}
        NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources=where).execute()
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)


def run_tutorials(framework: str, *, save: bool) -> None:
    """Run the tutorials for one framework; with `save`, keep their outputs in the files."""
    every = {path.stem for path in TUTORIALS.glob("*.ipynb")}
    for name in sorted(ON_TORCH_TPU if framework == "torch_tpu" else every - ON_TORCH_TPU):
        path = TUTORIALS / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        run(name, notebook)
        if save:
            keep_text(notebook)
            nbformat.write(notebook, path)


def keep_text(notebook: nbformat.NotebookNode) -> None:
    """Reduce a notebook's outputs to plain text that is the same on every machine that prints it."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            text = "".join(as_text(output) for output in cell.outputs)
            # Drop colours, all drawings of a line but the last, and this machine's directories.
            text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
            text = re.sub(r"(?m)^.*\r(?!\n)", "", text)
            text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []


def as_text(output: nbformat.NotebookNode) -> str:
    """Return what a reader of the notebook sees of an output as text; pictures are not kept."""
    if output.output_type == "stream":
        return str(output.text)
    return f"{output.data['text/plain']}\n" if "text/plain" in output.get("data", {}) else ""


def run_pages(names: list[str]) -> None:
    """Run the blocks of the pages with these names, or of all pages, each page in a kernel of its own.

    Raises:
        SystemExit: blocks of some pages have failed; all pages have run.
    """
    failed = []
    for path in blocks.pages():
        cells = [block.code for block in blocks.blocks(path) if block.reason is None]
        if cells and (path.stem in names or not names):
            notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
            try:
                run(path.stem, notebook)
            except CellControlSignal as error:
                print(f"{path.stem}: {error}", flush=True)
                failed.append(path.stem)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    what, *names = sys.argv[1:]
    if what == "pages":
        run_pages(names)
    else:
        run_tutorials(what, save="--save" in names)
