"""A job from its start to its exit code: signals, retries, and what is printed about failures."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polyxla.plugin import drop_output, say
from polyxla_pod.job import PodJob
from polyxla_pod.launcher import archive
from polyxla_pod.launcher.attempt import REFUSED, Attempt, JobFailure
from polyxla_pod.launcher.connection import LOST
from polyxla_pod.pipeline import HostState, Log, Pipeline, Screen
from polyxla_pod.transports import Transport

PAUSE_S = 1.0
"""Pause before a retry, in seconds. After a lost connection its host needs longer to end the command."""
SHOWN_FAILURES = 20
"""How many failures are printed: if no host can be reached, hundreds of lines would be the same."""
_FILES_PER_HOST = 4
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        exit_code: the exit code of the first failure; 0 without one; after a signal, 128 plus its number.
        failures: the failures of the last attempt, in order.
        attempts: how many times the command was started.
    """

    exit_code: int
    failures: tuple[JobFailure, ...]
    attempts: int


class JobRunner:
    """Runs a job. Call `run` once, in the main thread.

    Args:
        job: what to run.
        transport: makes the connections.
        states: the hosts' states, kept up to date.
        screen: shows the hosts' lines.
        log: keeps all lines.
    """

    def __init__(
        self,
        job: PodJob,
        transport: Transport,
        states: Sequence[HostState],
        screen: Screen,
        log: Log,
    ) -> None:
        self._job, self._transport, self._states = job, transport, states
        self._screen, self._log = screen, log
        self._attempt: Attempt | None = None
        self._signal: signal.Signals | None = None
        # The number of attempts so far, including the running one.
        self._count = 0

    def run(self) -> JobResult:
        """Run the job; return when it and all hosts have ended."""
        _allow_open_files(len(self._job.hosts) * _FILES_PER_HOST)
        # Pack once: all attempts and hosts get the same files, whatever changes on the disk.
        with contextlib.ExitStack() as stack:
            file = None
            if self._job.sync:
                packed = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".tar.gz"))
                archive.pack(Path(self._job.sync), packed)
                packed.flush()
                file = Path(packed.name)
            return asyncio.run(self._attempts(file))

    async def _attempts(self, file: Path | None) -> JobResult:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(self._try(file))
        # The loop runs these handlers between its callbacks, where cancelling a task is safe.
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._interrupt, number, task)
        try:
            return await task
        except asyncio.CancelledError:
            assert self._signal
            return JobResult(128 + self._signal, (), self._count)
        except OSError:
            # The terminal or the pipe is gone.
            drop_output()
            return JobResult(128 + signal.SIGPIPE, (), self._count)

    def _interrupt(self, number: signal.Signals, task: asyncio.Task[JobResult]) -> None:
        if self._signal is None:
            self._signal = number
            task.cancel()
            # This line is last, because it raises when the terminal is gone.
            say(f"{number.name}: ending the command on all hosts; once more closes the connections at once")
        elif self._attempt:
            # After a second signal the user does not want to wait for the grace time.
            self._attempt.kill()

    async def _try(self, file: Path | None) -> JobResult:
        while True:
            self._count += 1
            pipeline = Pipeline(self._states, self._screen, self._log)
            self._attempt = Attempt(self._job, self._transport, self._states, pipeline, file, self._report)
            failures = await self._attempt.run()
            result = JobResult(failures[0].exit_code if failures else 0, tuple(failures), self._count)
            # The preflight would refuse the same hosts again.
            if not failures or result.exit_code == REFUSED or self._count > self._job.retry:
                return result
            pause_s = PAUSE_S
            # The host must notice the loss and end the command, or it would still hold the chips.
            if result.exit_code == LOST:
                pause_s += self._job.lost_after_s + self._job.grace_s
            say(f"starting again in {pause_s:g} s, retry {self._count} of {self._job.retry}")
            await asyncio.sleep(pause_s)

    def _report(self, failures: Sequence[JobFailure]) -> None:
        for failure in failures[:SHOWN_FAILURES]:
            say(f"error: {failure.text}")
        if len(failures) > SHOWN_FAILURES:
            say(f"and {len(failures) - SHOWN_FAILURES} more")


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to what the hosts need, or to its hard limit."""
    # Each host takes three pipes and a file of its process; 1024 is a usual limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
