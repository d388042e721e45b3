"""Answers of replica processes: results and exceptions."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from polyxla import Replica, UsageError
from polyxla.contracts.job import ProcessMethod
from polyxla.launcher.messages import RemoteTraceback, ReplicaFailedError

pytestmark = pytest.mark.usefixtures("bare_runtime")


def _fail(replica: Replica) -> None:
    raise ZeroDivisionError("on purpose")


def test_an_exception_keeps_its_type_its_note_and_its_traceback(
    run_bare: Callable[..., list[Any]], method: ProcessMethod
) -> None:
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        run_bare(_fail, method=method)
    (note,) = caught.value.__notes__
    assert note.startswith("raised in the replica with ordinal 0 on ")
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "in _fail" in str(cause)
    assert str(cause).rstrip().endswith(f"ZeroDivisionError: on purpose\n{note}")


def test_a_usage_error_keeps_its_note(run_bare: Callable[..., list[Any]]) -> None:
    def refuse(_: Replica) -> None:
        raise UsageError("no", where="there", fix="Yes.")

    with pytest.raises(UsageError, match=r"^no \(from there\)\. Yes\.") as caught:
        run_bare(refuse)
    assert caught.value.__notes__[0].startswith("raised in the replica with ordinal 0 on ")


class _OwnInitError(Exception):
    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")


def test_an_exception_with_an_init_of_its_own_keeps_type_note_and_traceback(
    run_bare: Callable[..., list[Any]],
) -> None:
    def fail(_: Replica) -> None:
        error = _OwnInitError(3, "the start")
        error.where = "there"  # type: ignore[attr-defined]
        raise error

    with pytest.raises(_OwnInitError, match=r"^code 3 at the start") as caught:
        run_bare(fail)
    assert caught.value.where == "there"  # type: ignore[attr-defined]
    assert caught.value.__notes__[0].startswith("raised in the replica with ordinal 0")
    assert "in fail" in str(caught.value.__cause__)


def test_an_exception_that_does_not_pickle_arrives_as_text(
    run_bare: Callable[..., list[Any]], method: ProcessMethod
) -> None:
    def fail(_: Replica) -> None:
        raise ValueError("holds a lock", threading.Lock())

    with pytest.raises(ReplicaFailedError, match=r"ValueError: \('holds a lock', <unlocked"):
        run_bare(fail, method=method)


def test_an_exception_that_refers_to_a_module_of_the_replica_arrives_as_text(
    run_bare: Callable[..., list[Any]],
) -> None:
    def fail(_: Replica) -> None:
        # As pytest loads a conftest.py, and pluggy's error then has it as an attribute.
        error = ValueError("the reason")
        error.plugin = sys.modules["only_here"] = types.ModuleType("only_here")  # type: ignore[attr-defined]
        raise error

    with pytest.raises(ReplicaFailedError, match=r"^ValueError: the reason\n") as caught:
        run_bare(fail)
    assert "in fail" in str(caught.value.__cause__)


class _DoesNotLoad:
    def __reduce__(self) -> tuple[Any, ...]:
        return (int, ("not a number",))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        pytest.param(
            lambda: [threading.Lock()],
            "the function's result (list) cannot be sent back: cannot pickle '_thread.lock' object",
            id="does-not-pickle",
        ),
        pytest.param(
            _DoesNotLoad,
            "the function's result cannot be read here: ValueError: "
            "invalid literal for int() with base 10: 'not a number'",
            id="does-not-load",
        ),
    ],
)
def test_a_result_that_does_not_pickle_is_an_error(
    run_bare: Callable[..., list[Any]], method: ProcessMethod, make: Callable[[], Any], text: str
) -> None:
    with pytest.raises(UsageError) as caught:
        run_bare(lambda _: make(), method=method)
    assert str(caught.value) == (
        f"{text} (from launch). Return numbers, strings, CPU tensors, or collections of them."
    )
