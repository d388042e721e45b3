"""The parts of a module that are gathered one after another, so that a device never holds all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from polyxla.plugin import parameters_of

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


def find_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the elements of the outermost lists in `module` that have parameters, such as its layers.

    A block that shares a parameter with another part is left to the rest, which is gathered as a whole: two
    parts would each have their own copy of it.
    """
    found = list(dict.fromkeys(_elements(module)))
    uses = _uses(module)
    return [block for block in found if all(uses[one] == count for one, count in _uses(block).items())]


def _elements(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for part in module.children():
        if isinstance(module, _LISTS) and not isinstance(part, _LISTS):
            if any(True for _ in part.parameters()):
                yield part
        else:
            yield from _elements(part)


def _uses(module: torch.nn.Module) -> Counter[int]:
    return Counter(id(parameter) for _, _, parameter in parameters_of(module))
