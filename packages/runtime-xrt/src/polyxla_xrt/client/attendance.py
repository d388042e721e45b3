"""Taking part: the stream whose end tells the mesh service that this process is gone."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import grpc

from polyxla_xrt.client.probe import PROBE_S

RETRY_S = 0.1
"""Pause before the next attempt while nothing listens: ordinal 0 may only be starting."""


class Attendance:
    """One attempt to take part, and what holds the place afterwards.

    Args:
        stream: the call; read on a thread that ends with it.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._admitted: Future[None] = Future()
        self._thread = threading.Thread(target=self._read, name="mesh-attendance", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Block until the service lets this process in.

        Raises:
            grpc.RpcError: it does not, or there is none.
            TimeoutError: nothing answers.
        """
        try:
            self._admitted.result(timeout_s)
        except BaseException:
            self._stream.cancel()
            raise

    def end(self, timeout_s: float) -> None:
        """Wait for the stream to end, then cut it."""
        self._thread.join(timeout_s)
        self._stream.cancel()

    def _read(self) -> None:
        try:
            for _ in self._stream:
                self._admitted.set_result(None)
            ended: Exception = TimeoutError("the stream ended without a reply")
        except grpc.RpcError as error:
            ended = error
        if not self._admitted.done():
            self._admitted.set_exception(ended)


def attend(stub: Any, request: Any, wait_s: float) -> Attendance:
    """Take part, trying again while nobody listens.

    Raises:
        grpc.RpcError: the service refuses, or nothing can be reached in time.
        TimeoutError: something is reached and does not answer.
    """
    deadline = time.monotonic() + wait_s
    while True:
        attendance = Attendance(stub.Attend(request))
        try:
            attendance.wait(max(deadline - time.monotonic(), PROBE_S))
        except grpc.RpcError as error:
            is_last = time.monotonic() + RETRY_S >= deadline
            if error.code() is not grpc.StatusCode.UNAVAILABLE or is_last:
                raise
            time.sleep(RETRY_S)
        else:
            return attendance
