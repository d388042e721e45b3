"""``polyxla.launch(..., pod="ray")`` in the driver: the hosts' launches as a pod's job, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from polyxla import ReplicaLostError, UsageError
from polyxla.plugin import snapshot, unpack
from polyxla_pod.folding import FoldedLine
from polyxla_pod.job import PodJob
from polyxla_pod.launcher.attempt import REFUSED, Attempt, JobFailure
from polyxla_pod.launcher.connection import CONFIRM_S
from polyxla_pod.pipeline import HostState, Pipeline
from polyxla_pod.ray import env
from polyxla_pod.ray.call import HostCall
from polyxla_pod.ray.transport import RayTransport
from polyxla_pod.screens import PlainScreen
from polyxla_pod.transports import Target

COMMAND = ("python", "-m", "polyxla_pod.ray")
CONNECT_S = 60.0
"""Longest wait for a host's first answer, in seconds: Ray may have to start a Python process there."""
OUTCOME_S = 60.0
"""Longest wait for a host's results once it has ended, in seconds."""
STOPPED_S = 10.0
"""Longest wait for the thread beyond the hosts' end, in seconds."""


def launch(function: Callable[..., Any], options: Mapping[str, Any]) -> list[Any]:
    """Launch on each host of the cluster's only slice; return all results in ordinal order.

    Raises:
        UsageError: the cluster or a host cannot be used; nothing was started.
        ReplicaLostError: a host ended without a result.
        Exception: what a replica raised.
    """
    # Closed only after the results have been read, which arrive by the transport.
    with closing(RayTransport(Target(), HostCall(function, options).pickled())) as transport:
        job = PodJob(
            COMMAND,
            transport.hosts,
            transport.addresses,
            _variables(snapshot()),
            runtime=options["runtime"],
            connect_s=CONNECT_S,
        )
        failures = _AttemptThread(job, transport).run()
        if failures:
            _raise(failures, job, transport)
        numbered = [result for host in range(len(job.hosts)) for result in _results(host, job, transport)]
    return [value for _, value in sorted(numbered, key=lambda result: result[0])]


class _AttemptThread:
    """Runs the job in a thread: a notebook's main thread has an event loop already.

    Args:
        job: what to run.
        transport: makes the connections.
    """

    def __init__(self, job: PodJob, transport: RayTransport) -> None:
        self._job, self._transport = job, transport
        self._failures: Sequence[JobFailure] = ()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        # An event and not `join`: in Python 3.11, a thread whose `join` was interrupted counts as ended.
        self._is_over = threading.Event()

    def run(self) -> Sequence[JobFailure]:
        """Run it; return the failures, the first one first. An interrupt ends all hosts, then goes on."""
        # A daemon, so that hosts that cannot be ended do not keep the driver from ending.
        threading.Thread(target=self._main, name="polyxla-pod", daemon=True).start()
        try:
            self._is_over.wait()
        except BaseException:
            self._stop()
            raise
        if self._error:
            raise self._error
        return self._failures

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._is_over.set()

    async def _run(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        states = [HostState(name) for name in self._job.hosts]
        pipeline = _Pipeline(states, PlainScreen(), _NoLog())
        attempt = Attempt(self._job, self._transport, states, pipeline, None, lambda _: None)
        self._failures = await attempt.run()

    def _stop(self) -> None:
        if self._loop and self._task:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._is_over.wait(self._job.grace_s + CONFIRM_S + STOPPED_S)


class _Pipeline(Pipeline):
    """Leaves the traceback of the failure out: the exception that the launch raises has it."""

    def flush(self, *, traceback: bool = False) -> None:
        """Have everything shown that waits."""
        super().flush()


class _NoLog:
    """Keeps no log: the caller sees the output itself."""

    def add(self, line: FoldedLine) -> None:
        """Do nothing."""

    def tick(self) -> None:
        """Do nothing."""


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver that a launch on its own host would read."""
    # A launch inside of a host's function must not take this launch's files for its own.
    own = (env.POLYXLA_RAY_CALL, env.POLYXLA_RAY_OUTCOME)
    return {name: value for name, value in environ.items() if name.startswith("POLYXLA_") and name not in own}


def _results(host: int, job: PodJob, transport: RayTransport) -> list[tuple[int, Any]]:
    outcome = transport.outcome(host, OUTCOME_S)
    if not outcome:
        raise ReplicaLostError(f"{job.label(host)}: no results have arrived within {OUTCOME_S:g} s")
    results: list[tuple[int, Any]] = unpack(outcome)
    return results


def _raise(failures: Sequence[JobFailure], job: PodJob, transport: RayTransport) -> None:
    """Raise the first failure: a host's own exception, if it has left one."""
    first = failures[0]
    outcome = transport.outcome(first.host, OUTCOME_S) if first.host is not None else b""
    if outcome:
        try:
            unpack(outcome)
        except Exception as error:
            assert first.host is not None
            # The exception is the replica's own, so the host is added as a note.
            error.add_note(f"on {job.label(first.host)}")
            raise
    if first.exit_code == REFUSED:
        what = "; ".join(failure.text.rstrip(".") for failure in failures)
        raise UsageError(what, where="the hosts' preflight", fix="Nothing was started.")
    raise ReplicaLostError(first.text)
