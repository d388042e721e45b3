"""Promises. Most of an execution's results are never asked for, so theirs are made to cost little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from polyxla_bridge.errors import PjrtError
from polyxla_bridge.table.abi import Code


class Promise(Protocol):
    """What `concurrent.futures.Future` is to those who wait for it."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value; raise the error that kept it from being made."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error; None if there is a value."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` with this promise when it is kept or broken; at once if it is already."""


class Part:
    """One of several values that are made together. They share a lock, and none keeps another alive.

    Args:
        whole: completes when all values have been shared out.
    """

    __slots__ = ("_value", "whole")

    def __init__(self, whole: Future[None]) -> None:
        self.whole = whole
        self._value: Any = None

    def keep(self, value: Any) -> None:
        """Set the value; the whole is completed afterwards."""
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the whole."""
        self.whole.result(timeout)
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the whole, whose error is that of every part."""
        return self.whole.exception(timeout)

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` when the whole is done."""
        # Futures never forget their callbacks: one that still held this would keep the array alive.
        held = [self]
        self.whole.add_done_callback(lambda _: fn(held.pop()))


class Kept:
    """A promise that is kept already.

    Args:
        value: its value.
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        """Return the value."""
        return self._value

    def exception(self, timeout: float | None = None) -> None:
        """Return None: there is a value."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` now."""
        fn(self)


class Gone:
    """The promise of an array that was given up.

    Args:
        why: what became of it.
        type_: what it was.
    """

    __slots__ = ("_type", "_why")

    def __init__(self, why: str, type_: object) -> None:
        self._why = why
        self._type = type_

    def result(self, timeout: float | None = None) -> Any:
        """Raise the error."""
        raise self.exception()

    def exception(self, timeout: float | None = None) -> PjrtError:
        """Return the error; made here, because hardly anybody asks for it."""
        return PjrtError(Code.INVALID_ARGUMENT, f"this array {self._why}: {self._type}")

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` now."""
        fn(self)


def share(parts: Sequence[Part], values: Sequence[Any]) -> None:
    """Give each part its value."""
    for part, value in zip(parts, values, strict=True):
        part.keep(value)


def end_of(promise: Promise) -> Promise:
    """Return a promise that is done when this one is, the same for all that are done together."""
    return promise.whole if isinstance(promise, Part) else promise


def complete(done: Future[Any], task: Callable[[], Any]) -> None:
    """Keep a promise with the result of a task, or with its error."""
    try:
        result = task()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(result)


def then(first: Promise, follow: Callable[[Any], None], done: Future[Any]) -> None:
    """Call `follow` with a promise's value, on the thread that makes it; an error goes to `done`."""

    def pass_on(first: Promise) -> None:
        try:
            follow(first.result())
        except BaseException as error:
            done.set_exception(error)

    first.add_done_callback(pass_on)
