"""The table of a module's layers that is printed before training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from polyxla_training.checkpoint.errors import size_text

if TYPE_CHECKING:
    import torch

MOST_LAYERS = 20
"""Layers of a module that is small enough for a table of all of them."""
WIDTH = 110
"""Columns of the table where there is no terminal."""


def print_layers(module: torch.nn.Module, summary: bool | int) -> None:
    """Print the layers on standard error, with the numbers and the bytes of their parameters.

    A layer contains its sublayers. Tied parameters are in the row of each layer that has them, and once in
    the last row, which is the whole module. A mesh divides none of the numbers.

    Args:
        module: the module, in the dtypes that it trains in.
        summary: number of levels; True: all, but one if there are more than `MOST_LAYERS` layers.
    """
    from rich.console import Console
    from rich.table import Table

    depth = _levels(module) if summary is True else summary
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", "type"):
        table.add_column(name, overflow="fold")
    for name in ("parameters", "trainable", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, layer in _layers(module, depth):
        table.add_row(name, type(layer).__name__, *_numbers(layer))
    table.add_row("all", type(module).__name__, *_numbers(module), style="bold")
    on_terminal = sys.stderr.isatty()
    width = None if on_terminal else WIDTH
    # In a notebook too it is plain text, as the other lines are: forks of a kernel cannot display.
    console = Console(stderr=True, force_terminal=on_terminal, force_jupyter=False, width=width)
    console.print(table, highlight=False, markup=False)


def _levels(module: torch.nn.Module) -> int:
    names = [name for name, _ in module.named_modules() if name]
    return 1 + max((name.count(".") for name in names), default=0) if len(names) <= MOST_LAYERS else 1


def _layers(module: torch.nn.Module, depth: int) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, layer in module.named_modules():
        if name and name.count(".") < depth:
            yield name, layer


def _numbers(layer: torch.nn.Module) -> tuple[str, str, str]:
    parameters = list(layer.parameters())
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    size_bytes = sum(one.numel() * one.element_size() for one in parameters)
    return f"{sum(one.numel() for one in parameters):,}", f"{trained:,}", size_text(size_bytes)
