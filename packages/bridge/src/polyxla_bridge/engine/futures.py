"""Futures that cost little: most results of an execution are never waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError


class FutureLike(Protocol):
    """The part of `concurrent.futures.Future` that readers of a value need."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value; raise the error if there is one."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error; None if there is a value."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` with this future when it is done; at once if it is done already."""


class Outcome(Protocol):
    """The part of `concurrent.futures.Future` that a task completes."""

    def set_result(self, result: Any, /) -> None:
        """Complete it with a result."""

    def set_exception(self, exception: BaseException, /) -> None:
        """Complete it with an error."""


class GroupedFuture:
    """One of several values that become available together, with one lock for the whole group.

    The values do not keep each other alive.

    Args:
        group: completes after every value of the group is set.
    """

    __slots__ = ("_value", "group")

    def __init__(self, group: Future[None]) -> None:
        self.group = group
        self._value: Any = None

    def set_value(self, value: Any) -> None:
        """Set the value. Call before `group` completes."""
        self._value = value

    @property
    def early_value(self) -> Any:
        """The value if it is set, also before the group is done; else None."""
        return self._value

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the group, and return this value."""
        self.group.result(timeout)
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the group, and return its error, which every member has."""
        return self.group.exception(timeout)

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` with this future when the group is done."""
        # A Future never drops its callbacks, so the callback pops its reference to this object. Otherwise it
        # would keep the array alive.
        reference = [self]
        self.group.add_done_callback(lambda _: fn(reference.pop()))


class CompletedFuture:
    """A future that is done from the beginning.

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


class DeletedFuture:
    """The future of an array that was deleted or donated; reading it raises.

    Args:
        reason: continues the sentence "this array ...".
        type_: type of the array.
    """

    __slots__ = ("_reason", "_type")

    def __init__(self, reason: str, type_: object) -> None:
        self._reason = reason
        self._type = type_

    def result(self, timeout: float | None = None) -> Any:
        """Raise the error."""
        raise self.exception()

    def exception(self, timeout: float | None = None) -> PjrtError:
        """Return the error; it is made on demand, because it is rarely read."""
        return PjrtError(Code.INVALID_ARGUMENT, f"this array {self._reason}: {self._type}")

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` now."""
        fn(self)


def set_values(futures: Sequence[GroupedFuture], values: Sequence[Any]) -> None:
    """Set the value of each member of a group."""
    for future, value in zip(futures, values, strict=True):
        future.set_value(value)


def completion_of(future: FutureLike) -> FutureLike:
    """Return the future that completes together with `future`; members of a group share it."""
    return future.group if isinstance(future, GroupedFuture) else future


def complete(future: Outcome, task: Callable[[], Any]) -> None:
    """Run a task, and complete a future with its result or its error."""
    try:
        result = task()
    # The thread must survive whatever the task raises: other tasks are queued behind it.
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def then(first: FutureLike, follow: Callable[[Any], None], done: Future[Any]) -> None:
    """Call `follow` with a future's value, on the thread that completes it; an error goes to `done`."""

    def pass_on(first: FutureLike) -> None:
        # A Future only logs what a callback raises, and then nothing would complete `done`.
        try:
            follow(first.result())
        except BaseException as error:
            done.set_exception(error)

    first.add_done_callback(pass_on)


def when_all_are_done(futures: Sequence[FutureLike], then: Callable[[BaseException | None], None]) -> None:
    """Call `then` with an error of one of the futures, or None, on the thread that completes the last one."""
    left, lock = len(futures), threading.Lock()

    def count(_: FutureLike) -> None:
        nonlocal left
        # Futures of several cores complete on several threads, of which exactly one must call `then`.
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            # This is outside of the lock, because `then` sends an answer and may block.
            then(next((error for future in futures if (error := future.exception())), None))

    for future in futures:
        future.add_done_callback(count)
    if not futures:
        then(None)
