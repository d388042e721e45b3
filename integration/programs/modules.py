"""Computes samples of torch's modules on a device of torch_xla and on the CPU, forward and backward.

Prints the number of samples, and how modules differ.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from operators import Numbers, device_and_finish, difference, gradients, moved, tensors
from torch.nn.parameter import is_lazy

SAMPLES = 4
"""Samples of each module, in training and in evaluation."""
TOLERANCE = 1e-4


def computed(module: torch.nn.Module, given: Any, device: str) -> Numbers:
    """Return a module's results, the gradients of its inputs and parameters, and its buffers."""
    try:
        module = copy.deepcopy(module).to(device)
        args, kwargs = moved((given.args, given.kwargs), device)
        results = tensors(module(*args, **kwargs))
        found = gradients(results, (*tensors((args, kwargs)), *module.parameters()))
        return [x.detach().cpu() for x in (*results, *found, *module.buffers())]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def samples(info: Any, is_training: bool) -> Iterator[Any]:
    """Return some of the samples of a module that call it."""
    options = {"dtype": torch.float32, "requires_grad": True, "training": is_training}
    given = info.module_inputs_func(info, device="cpu", **options)
    return itertools.islice((sample for sample in given if sample.forward_input is not None), SAMPLES)


def main() -> None:
    from torch.testing._internal.common_modules import module_db

    device, _ = device_and_finish()
    wrong: dict[str, str] = {}
    count = 0
    for number, (info, is_training) in enumerate(itertools.product(module_db, (True, False))):
        name = info.module_cls.__name__
        print(f"{number} of {2 * len(module_db)}: {name}", file=sys.stderr)
        for sample in samples(info, is_training):
            torch.manual_seed(0)
            made = sample.constructor_input
            module = info.module_cls(*made.args, **made.kwargs).train(is_training)
            if any(map(is_lazy, module.parameters())):
                # Each device would draw parameters of its own.
                continue
            ours, theirs = (computed(module, sample.forward_input, where) for where in (device, "cpu"))
            count += 1
            if text := difference(ours, theirs, TOLERANCE):
                wrong[name] = f"{sample.desc}: {text}"
    print(json.dumps({"samples": count, "wrong": wrong}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
