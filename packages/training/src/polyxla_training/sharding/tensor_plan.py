"""Tensor parallelism: a module's ``tp_plan``, and the parts of the module that it divides."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from polyxla import UsageError

_STYLES: dict[str, type[ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "sequence_parallel": SequenceParallel,
}
"""Styles by their names in the plans of transformers. Source: its ``integrations/tensor_parallel.py``."""
_GATHERING = ("colwise_rep", "colwise_gather_output")
"""Their names, in two versions, of a layer whose output every replica has whole."""


def find_styles(module: torch.nn.Module) -> dict[torch.nn.Module, ParallelStyle]:
    """Return how each part of `module` is divided that its attribute ``tp_plan`` names.

    Raises:
        UsageError: there is no plan, or it names a part or a style that does not exist.
    """
    plan = getattr(module, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise UsageError(
            f"{type(module).__name__} has no tp_plan: {plan!r}",
            where="the dimension tp-plan of the mesh",
            fix='Give the module an attribute such as tp_plan = {"layers.*.up": "colwise", '
            '"layers.*.down": "rowwise"}, or leave tp-plan out.',
        )
    found: dict[torch.nn.Module, ParallelStyle] = {}
    for pattern, style in plan.items():
        parts = [part for name, part in module.named_modules() if _matches(name, pattern)]
        if not parts:
            raise UsageError(
                f"no part of {type(module).__name__} is called {pattern!r}",
                where=f"{type(module).__name__}.tp_plan",
                fix="Write the names that named_modules() gives, with * for one name between dots.",
            )
        made = _style(style, pattern, type(module).__name__)
        found |= dict.fromkeys(parts, made)
    return found


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _style(style: Any, pattern: str, owner: str) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style in _GATHERING:
        return ColwiseParallel(output_layouts=Replicate())
    if style not in _STYLES:
        raise UsageError(
            f"{style!r} is not a style of a part: {', '.join((*_STYLES, _GATHERING[0]))} are",
            where=f"{owner}.tp_plan[{pattern!r}]",
            fix="Write one of them, or a ParallelStyle of torch.distributed.tensor.parallel.",
        )
    return _STYLES[style]()
