"""The transport ``ray``: each host of a slice is a node of a Ray cluster, served by one thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from polyxla import UsageError
from polyxla.plugin import snapshot
from polyxla_pod.messages import HostMessage
from polyxla_pod.ray import cluster, relay
from polyxla_pod.ray.cluster import CHIPS, choose, find_slices
from polyxla_pod.ray.node import READ_BYTES, Ending, NodeActor
from polyxla_pod.transports import Target, Transport

END_S = 15.0
"""Longest wait for a program to end once its input is closed, in seconds; then only its actor is ended."""
PLACE_S = 600.0
"""Longest wait for a node, in seconds; the launcher gives up earlier, and a retry places another actor."""
RETRY_S = 1.0
"""Pause between two actors, in seconds."""
LOST_S = 2.0
"""Time for Ray to notice that the node of a failed program was lost, in seconds."""
CLOSE_S = 5.0
"""Longest wait for the tasks of the thread to end, in seconds."""
START_S = 10.0
"""Longest wait for the thread, in seconds."""
OPTIONS = ("address", "type")
"""Names of the options: the cluster's address, and the type of the slice."""


class Broker:
    """Connects each relay with an actor on its host. Has a thread of its own, which `close` ends.

    Args:
        place: makes the actor on the host with a number.
        call: the pickled call for `polyxla_pod.ray.call`; None for commands.

    Attributes:
        path: of the socket to which relays connect.
    """

    def __init__(self, place: Callable[[int], Any], call: bytes | None) -> None:
        self._place, self._call = place, call
        # mkdtemp makes the directory for this user only, which protects the socket.
        self._directory = tempfile.TemporaryDirectory(prefix="polyxla-ray-")
        self.path = str(Path(self._directory.name, "socket"))
        self._outcomes: dict[int, Future[bytes]] = {}
        # The loop is this object's own, because it outlives the launcher's loop.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="polyxla-ray", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(START_S)

    def outcome(self, host: int, timeout_s: float) -> bytes:
        """Return what the host's call has written; empty without it, or if it does not arrive in time."""
        with contextlib.suppress(TimeoutError):
            return self._outcomes[host].result(timeout_s)
        return b""

    def close(self) -> None:
        """End the thread. The hosts' inputs close with their actors."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._directory.cleanup()

    def _run(self) -> None:
        self._loop.run_forever()
        # Cancelled tasks need the loop once more: their `finally` ends the actors.
        if tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_S))
        self._loop.close()

    async def _listen(self) -> None:
        # The directory for temporary files may be too deep for the 107 characters of a socket's address.
        directory = os.open(self._directory.name, os.O_PATH | os.O_DIRECTORY)
        try:
            await asyncio.start_unix_server(self._serve, f"/proc/self/fd/{directory}/socket")
        finally:
            os.close(directory)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import ray
        from ray.exceptions import RayActorError

        header = json.loads(await reader.readline())
        host: int = header["host"]
        # Set before the program starts, because `outcome` may be called as soon as the host has ended.
        outcome = self._outcomes[host] = Future()
        actor = None
        try:
            async with asyncio.timeout(PLACE_S):
                actor = await self._start(host, header["program"])
            ending = await _relay(actor, reader, writer)
            outcome.set_result(ending.outcome)
            if ending.code:
                # A node ends in steps: its actor may still tell that the program has failed, which is how
                # the loss of the node begins.
                await asyncio.sleep(LOST_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(_finish(actor), END_S)
                _report(writer, _explain(header["program"], ending))
        except asyncio.CancelledError:
            # `close` cancels the task. Its error has no reader, and asyncio would print it.
            pass
        except RayActorError as error:
            _report(writer, f"its Ray node was lost, or the actor on it: {_first_line(error)}")
        except Exception as error:
            _report(writer, f"Ray cannot run the host's program: {_first_line(error)}")
        finally:
            if not outcome.done():
                outcome.set_result(b"")
            if actor:
                ray.kill(actor)
            writer.close()

    async def _start(self, host: int, program: Sequence[str]) -> Any:
        """Start the program on its host; return the actor."""
        import ray
        from ray.exceptions import RayActorError

        while True:
            actor = self._place(host)
            try:
                # This is the first call, so it also waits for the actor to be placed.
                await actor.start.remote(program, self._call)
            except RayActorError:
                # Ray has not yet noticed that the node is lost. Later it places actors on the replacement.
                await asyncio.sleep(RETRY_S)
            except BaseException:
                ray.kill(actor)
                raise
            else:
                return actor


async def _relay(actor: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Ending:
    """Pass bytes in both directions until the program has ended."""

    async def inward() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                await actor.write.remote(data)
        await actor.close.remote()

    async def outward() -> None:
        while data := await actor.read.remote():
            # A relay that has ended has closed the input, so the program ends. Its last output has no reader.
            with contextlib.suppress(OSError):
                writer.write(data)
                await writer.drain()

    passing: Sequence[Coroutine[Any, Any, None]] = (inward(), outward())
    inner, outer = map(asyncio.create_task, passing)
    try:
        await asyncio.wait((inner, outer), return_when=asyncio.FIRST_COMPLETED)
        # The program has closed its output, or its input is closed, which makes it end.
        await asyncio.wait_for(outer, END_S)
        ending: Ending = await asyncio.wait_for(_finish(actor), END_S)
    finally:
        inner.cancel()
        outer.cancel()
        await asyncio.gather(inner, outer, return_exceptions=True)
    return ending


async def _finish(actor: Any) -> Any:
    return await actor.finish.remote()


def _report(writer: asyncio.StreamWriter, text: str) -> None:
    """Name the problem as the host would."""
    with contextlib.suppress(OSError):
        # The launcher shows errors of the host with its name, so this speaks as the host does.
        writer.write(HostMessage("error", {"text": text, "code": None}).encode())


def _explain(program: Sequence[str], ending: Ending) -> str:
    last = (ending.said.strip().splitlines() or ["it printed no reason"])[-1]
    return f"{program[0]} ended with exit code {ending.code}: {last}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


class RayTransport(Transport):
    """Takes a whole slice of a Ray cluster, and runs one actor per host.

    Making one connects this process to the cluster. Blocks for at most `cluster.CONNECT_S` and
    `cluster.RESERVE_S`. The chips are free again after `close`, or with the end of this process.

    Args:
        target: its TPU is the slice's name, its options are ``NAME=VALUE``.
        call: a pickled call for `polyxla_pod.ray.call`; None for commands.

    Raises:
        UsageError: there is no such cluster or slice, or its chips are in use.
    """

    def __init__(self, target: Target, call: bytes | None = None) -> None:
        import ray

        options = _options(target)
        cluster.connect(options.get("address"), snapshot())
        self._slice = choose(find_slices(ray.nodes()), target.tpu, options.get("type"))
        self.hosts = tuple(host.address for host in self._slice.hosts)
        self._group = cluster.reserve(self._slice)
        self._broker = Broker(self._place, call)

    def command(self, host: int, program: Sequence[str]) -> list[str]:
        """Return the command of a relay, which imports neither Ray nor an environment's packages."""
        # -I and -S skip site-packages: there is a relay per host, and each starts in milliseconds.
        return [sys.executable, "-I", "-S", relay.__file__, self._broker.path, str(host), *program]

    def check_by_hand(self, host: int) -> str:
        """Return ``ray status``."""
        return "ray status"

    def outcome(self, host: int, timeout_s: float) -> bytes:
        """Return what the host's call has written; empty without it, or if it does not arrive in time."""
        return self._broker.outcome(host, timeout_s)

    def close(self) -> None:
        """Give the chips back, which ends what runs on them."""
        from ray.util.placement_group import remove_placement_group

        self._broker.close()
        remove_placement_group(self._group)

    def _place(self, host: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=host)
        chips = {CHIPS: self._slice.hosts[host].chips}
        # The actor asks for no CPUs, because other actors may hold all of them.
        return ray.remote(NodeActor).options(num_cpus=0, resources=chips, scheduling_strategy=where).remote()


def _options(target: Target) -> dict[str, str]:
    found = {}
    for text in target.options:
        name, equals, value = text.partition("=")
        if name not in OPTIONS or not equals:
            raise UsageError(
                f"{text!r} is not an option of the transport ray",
                where=f"--engine-option={text}",
                fix="Write address=HOST:PORT or type=v4-16.",
            )
        found[name] = value
    if target.hosts:
        raise UsageError(
            "the transport ray finds the hosts in the cluster",
            where=f"--hosts {','.join(target.hosts)}",
            fix="Leave --hosts out, or name the slice with --tpu NAME.",
        )
    return found
