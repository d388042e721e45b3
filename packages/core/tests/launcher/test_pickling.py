"""What other processes get of the functions of a script."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

import cloudpickle
import pytest

from polyxla.launcher.pickling import dumps, pickles


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
