"""What other processes get of the functions of a script."""

from __future__ import annotations

import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from types import ModuleType

import cloudpickle
import pytest

from polyxla.launcher.messages import dumps, pickles


def test_a_traceback_of_a_function_from_another_process_has_its_source_lines() -> None:
    def outer() -> Callable[[], None]:
        def inner() -> None:
            raise ValueError("on purpose")  # the line

        return inner

    with pytest.raises(ValueError, match="on purpose") as error:
        cloudpickle.loads(dumps(outer))()()
    last = traceback.extract_tb(error.tb)[-1]
    assert (last.filename, last.line) == (__file__, 'raise ValueError("on purpose")  # the line')


def test_what_cannot_be_sent_is_found() -> None:
    assert pickles(lambda: None)
    assert not pickles(threading.Lock())


def test_objects_that_stand_for_modules_and_operators_of_torch_are_sent_by_name() -> None:
    import torch

    aten, backend = torch.ops.aten, torch.backends.cudnn
    packet, overload = aten.relu, aten.relu.default
    below = torch.tensor(-1.0)
    functions = [
        lambda: torch.ops.aten.relu(below).item(),
        lambda: aten.relu(below).item(),
        lambda: packet(below).item(),
        lambda: overload(below).item(),
        lambda: torch.backends.cudnn.flags.__name__,
        lambda: backend.flags.__name__,
    ]
    # The other process has imported nothing.
    code = "import sys, cloudpickle; print([f() for f in cloudpickle.loads(sys.stdin.buffer.read())])"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, input=dumps(functions), capture_output=True, timeout=120, check=False)
    assert done.stdout == b"[0.0, 0.0, 0.0, 0.0, 'flags', 'flags']\n", done.stderr


class _Made(ModuleType):
    """A module that is not found by its name."""


def test_a_module_that_is_not_found_by_its_name_is_not_sent_by_it() -> None:
    assert not pickles(_Made("json"))
