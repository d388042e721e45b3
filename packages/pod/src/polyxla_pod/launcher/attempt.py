"""One start of a job on all hosts: connect, compare, copy, start, wait, and end all hosts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from polyxla.plugin import POLYXLA_SECRET, say
from polyxla_pod.job import PodJob
from polyxla_pod.launcher import archive, preflight
from polyxla_pod.launcher.connection import LOST, HostConnection, HostEndedError
from polyxla_pod.pipeline import HostState, Pipeline
from polyxla_pod.tpu_nodes import READY
from polyxla_pod.transports import Transport

FACTS_S = 15.0
"""Longest wait for a host's facts, in seconds."""
WORKER_S = 120.0
"""Longest wait for a host's worker to be ready, in seconds: on a busy machine its imports take long."""
TOKEN_BYTES = 32
"""Length of the workers' token, in bytes."""
SETTLE_S = 1.5
"""How long to wait for the failure that explains the first one, in seconds."""
TICK_S = 0.1
"""How often lines that are due are shown, in seconds."""
NOT_FOUND = 127
"""Exit code of a shell for a program that does not exist."""
TELL_S = 1.0
"""Longest wait for the failures to be shown before the other hosts are ended, in seconds."""
REFUSED = 2
"""Exit code if the preflight finds a problem, before anything is started."""


@dataclass(frozen=True)
class JobFailure:
    """Why a job failed.

    Attributes:
        text: one line, which begins with the host.
        exit_code: what the launcher exits with.
        host: the host's number; None if the failure concerns no single host.
        is_worker: whether its worker has failed, which explains failures on all hosts.
    """

    text: str
    exit_code: int
    host: int | None = None
    is_worker: bool = False


class Attempt:
    """One start of a job. Belongs to the event loop in which `run` is called.

    Args:
        job: what to run.
        transport: makes the connections.
        states: the hosts' states, kept up to date.
        pipeline: receives the hosts' lines.
        file: the tar file to copy, if the job has one.
        report: receives the failures, before the other hosts are ended.
    """

    def __init__(
        self,
        job: PodJob,
        transport: Transport,
        states: Sequence[HostState],
        pipeline: Pipeline,
        file: Path | None,
        report: Callable[[Sequence[JobFailure]], None],
    ) -> None:
        self._job, self._transport, self._states = job, transport, states
        self._pipeline, self._file, self._report = pipeline, file, report
        self._connections: list[HostConnection] = []
        # Hosts whose end the pipeline has received; each end is passed on once.
        self._noted: set[int] = set()
        self._has_started = False

    async def run(self) -> list[JobFailure]:
        """Run the command on all hosts; return the failures, the first one first.

        All hosts have ended when it returns, even if it is cancelled.

        Raises:
            OSError: nothing shows the output any more.
        """
        for host in range(len(self._job.hosts)):
            command = self._transport.command(host, self._job.program)
            self._connections.append(HostConnection(host, self._job, command, self._pipeline.add))
        work = asyncio.create_task(self._work())
        # These two run until they are cancelled, and end earlier only with an error.
        shows = [asyncio.create_task(self._tick()), asyncio.create_task(self._show())]
        tasks: list[asyncio.Task[Any]] = [work, *shows]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # This also runs if the task is cancelled, because no host may keep running.
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            # The output is shown until all hosts have ended: their last lines explain most failures.
            await self._stop()
            for task in shows:
                task.cancel()
            await asyncio.gather(*shows, return_exceptions=True)
            self._pipeline.flush()
            await asyncio.to_thread(self._pipeline.show)
        for task in shows:
            if not task.cancelled():
                task.result()
        return work.result()

    def kill(self) -> None:
        """Close all connections at once; each host then ends the command by itself."""
        for connection in self._connections:
            connection.kill()

    async def _work(self) -> list[JobFailure]:
        if failures := await self._phases():
            self._pipeline.flush(traceback=True)
            # A screen that is blocked must not keep the other hosts from being ended.
            await asyncio.wait([asyncio.create_task(self._tell(failures))], timeout=TELL_S)
        return failures

    async def _tell(self, failures: Sequence[JobFailure]) -> None:
        await asyncio.to_thread(self._pipeline.show)
        # The report follows the output, so that the user reads the failure last.
        await asyncio.to_thread(self._report, failures)

    async def _phases(self) -> list[JobFailure]:
        if failures := await self._on_all("connecting", HostConnection.open):
            return [self._with_remedy(failure) for failure in failures]
        if self._job.preflight and (failures := await self._preflight()):
            return failures
        # Keep watching for lost hosts while copying, because a large directory takes minutes.
        if self._file and (failures := await self._on_all("copying", self._copy, asyncio.FIRST_EXCEPTION)):
            return failures
        if self._job.starts_workers and (failures := await self._start_workers()):
            return failures
        # From here on, a host whose connection is lost may go on running the command for a while.
        self._has_started = True
        # The launches on the hosts recognise each other by this secret. It is new for each start, so that
        # processes left from an earlier start cannot join; the user's own secret wins.
        secret = {POLYXLA_SECRET: secrets.token_hex(TOKEN_BYTES)}
        for connection in self._connections:
            self._states[connection.host].state = "running"
            environ = secret | self._job.environ_of(connection.host)
            command = list(self._job.command)
            connection.send("start", command=command, environ=environ, directory=self._job.directory)
        return await self._wait()

    async def _on_all(
        self,
        state: str,
        act: Callable[[HostConnection], Coroutine[Any, Any, None]],
        until: str = asyncio.ALL_COMPLETED,
    ) -> list[JobFailure]:
        """Do something on all hosts at once; return the failures of those that ended.

        Args:
            state: the hosts' state while they do it.
            act: what to do; raises `HostEndedError`.
            until: whether to wait for all hosts, or for the first that ends.
        """
        for host in self._states:
            host.state = state
        tasks = [asyncio.create_task(act(connection)) for connection in self._connections]
        try:
            await asyncio.wait(tasks, return_when=until)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            # A host's end is a result; any other exception is a defect, and must not pass for one.
            if isinstance(result, Exception) and not isinstance(result, HostEndedError):
                raise result
        return [self._failure(connection) for connection in self._connections if connection.ended.done()]

    async def _preflight(self) -> list[JobFailure]:
        facts: dict[int, dict[str, object]] = {}

        async def ask(connection: HostConnection) -> None:
            connection.send("check", **preflight.questions(self._job, connection.host))
            facts[connection.host] = (await connection.answer("facts", FACTS_S)).content["facts"]

        if failures := await self._on_all("checking", ask):
            return failures
        problems = preflight.find_problems(
            [facts[connection.host] for connection in self._connections],
            [connection.clock_difference_s for connection in self._connections],
            version("polyxla-core"),
        )
        return [
            JobFailure(
                problem.text if problem.host is None else f"{self._job.label(problem.host)}: {problem.text}",
                REFUSED,
                problem.host,
            )
            for problem in problems
        ]

    async def _start_workers(self) -> list[JobFailure]:
        # A new token for each start, sent over the connections only, and never written to a disk.
        token = secrets.token_hex(TOKEN_BYTES)

        async def start(connection: HostConnection) -> None:
            command = self._job.worker_command(connection.host)
            environ = self._job.environ_of(connection.host)
            connection.send("worker", command=command, environ=environ, token=token, ready=READY)
            await connection.worker_ready(WORKER_S)

        return await self._on_all("starting its worker", start, asyncio.FIRST_EXCEPTION)

    async def _copy(self, connection: HostConnection) -> None:
        assert self._file
        assert self._job.directory
        await archive.send(connection, self._file, self._job.directory)

    async def _wait(self) -> list[JobFailure]:
        """Wait until all hosts have ended, or one has failed."""
        waiting = {connection.ended: connection for connection in self._connections}
        failures: list[JobFailure] = []
        while waiting:
            # The first failure to arrive may be a consequence: its cause on another host may arrive later.
            limit_s = SETTLE_S if failures else None
            done, _ = await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            # Sorted by number, so that equal runs name the same host.
            ended = sorted((waiting.pop(future) for future in done), key=lambda connection: connection.host)
            failures += [self._failure(connection) for connection in ended if self._note(connection)]
            # The sort is stable: causes first, otherwise in the order of arrival.
            failures.sort(key=self._is_consequence)
            if failures and not (done and self._is_consequence(failures[0])):
                break
        return failures

    def _is_consequence(self, failure: JobFailure) -> bool:
        if failure.host is None or failure.is_worker:
            return False
        return self._pipeline.is_consequence(failure.host)

    def _note(self, connection: HostConnection) -> bool:
        """Take note of a host's end, once; return whether it has failed."""
        has_failed = connection.ended.result().code != 0
        if connection.host not in self._noted:
            self._noted.add(connection.host)
            self._states[connection.host].state = "failed" if has_failed else "ended"
            self._pipeline.end(connection.host, failed=has_failed)
        return has_failed

    def _failure(self, connection: HostConnection) -> JobFailure:
        end = connection.ended.result()
        self._states[connection.host].state = "failed"
        label = self._job.label(connection.host)
        return JobFailure(f"{label}: {end}", end.exit_code, connection.host, end.is_worker)

    def _with_remedy(self, failure: JobFailure) -> JobFailure:
        """Add what a user can do about a host that cannot be reached."""
        assert failure.host is not None
        # The text is that of Python or of a shell on the host, which no code distinguishes.
        if "No module named" in failure.text or f"exit code {NOT_FOUND}" in failure.text:
            fix = f"Install polyxla-pod there for {self._job.python}, or name another Python: --python PATH."
        else:
            fix = f"This must work without a question: {self._transport.check_by_hand(failure.host)}"
        return JobFailure(f"{failure.text}. {fix}", failure.exit_code, failure.host)

    async def _stop(self) -> None:
        """End all hosts at once, and report those that do not confirm it."""
        # Take note before stopping, which ends the other hosts as well.
        ended = [connection for connection in self._connections if connection.ended.done()]
        await asyncio.gather(*(connection.stop() for connection in self._connections))
        for connection in self._connections:
            self._note(connection)
            if connection not in ended:
                # This host was stopped because of another one, and has not failed.
                self._states[connection.host].state = "ended"
                if self._has_started and (end := connection.ended.result()).exit_code == LOST:
                    limit_s = self._job.lost_after_s + self._job.grace_s
                    say(f"{self._job.label(connection.host)} {end}; it ends the command within {limit_s:g} s")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._pipeline.tick()

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await asyncio.to_thread(self._pipeline.show)
