"""Attendance at a service: the stream whose end shows each side that the other is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc

from polyxla_xrt.client.probe import PROBE_S, RETRY_S


class Attendance:
    """One attempt to attend, and the stream that holds this participant's place afterwards.

    Args:
        stream: the call; a thread reads it until it ends.

    Attributes:
        ended: completes when the stream has ended, with the error that ended it.
    """

    def __init__(self, stream: Any) -> None:
        self.ended: Future[Exception] = Future()
        self._stream = stream
        self._admitted: Future[None] = Future()
        self._thread = threading.Thread(target=self._read, name="polyxla-attendance", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Block until the service admits this process.

        Raises:
            grpc.RpcError: the service refuses, or cannot be reached.
            TimeoutError: nothing answers in time.
        """
        try:
            self._admitted.result(timeout_s)
        except BaseException:
            # This covers Ctrl-C as well: an open stream would occupy the ordinal at the service.
            self._stream.cancel()
            raise

    def end(self, timeout_s: float) -> None:
        """Wait for the stream to end, then cut it."""
        self._thread.join(timeout_s)
        self._stream.cancel()

    def _read(self) -> None:
        try:
            # The only reply is the admission. After it, the loop waits for the end of the stream.
            for _ in self._stream:
                self._admitted.set_result(None)
            ended: Exception = TimeoutError("the stream ended without a reply")
        except grpc.RpcError as error:
            ended = error
        if not self._admitted.done():
            self._admitted.set_exception(ended)
        self.ended.set_result(ended)


def attend(begin: Callable[[], Any], wait_s: float) -> Attendance:
    """Attend; retry while nothing listens, since the service may still be starting.

    Args:
        begin: begins the call.
        wait_s: longest wait for the service, in seconds.

    Raises:
        grpc.RpcError: the service refuses, or cannot be reached in time.
        TimeoutError: a peer accepts the connection and does not answer.
    """
    deadline = time.monotonic() + wait_s
    while True:
        attendance = Attendance(begin())
        try:
            attendance.wait(max(deadline - time.monotonic(), PROBE_S))
        except grpc.RpcError as error:
            # Any code but UNAVAILABLE is the service's answer, which a second attempt would not change.
            is_last = time.monotonic() + RETRY_S >= deadline
            if error.code() is not grpc.StatusCode.UNAVAILABLE or is_last:
                raise
            time.sleep(RETRY_S)
        else:
            return attendance
