"""`LocalEngine`: what the engines share that drive devices in this process; and the devices' threads."""

from __future__ import annotations

import logging
import operator
import queue
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from polyxla_bridge.engine.engine import FINISH_TIMEOUT_S, Buffer, DeviceActivity, Engine, EngineDevice
from polyxla_bridge.engine.futures import FutureLike, GroupedFuture, Outcome, complete
from polyxla_bridge.engine.memory_accounting import MemoryAccount, MemoryNeeds, machine_bytes
from polyxla_bridge.engine.stall_watchdog import JobProgress, StallWatchdog
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import keep_first
from polyxla_bridge.programs import numerics
from polyxla_bridge.programs.cache import ProgramCache
from polyxla_bridge.programs.compile_once import CompileOnce
from polyxla_bridge.programs.executable import ArrayType, Executable

_log = logging.getLogger("polyxla.bridge")
_Array = TypeVar("_Array")
_Running = tuple[str | None, tuple[str, ...], frozenset[frozenset[int]], float]
"""The running program, its collectives, the groups that meet in them, and the time of its start."""


Task = tuple[Outcome, Callable[[], Any]]
"""What a device's thread runs, and what its result or error completes."""


class DeviceThread:
    """Runs the tasks queued for one device, in order, on one thread.

    Args:
        device: index of the device.
        name: of the thread, before the index.
    """

    def __init__(self, device: int, name: str = "polyxla-device") -> None:
        self._device = device
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # The tuple is replaced as a whole, because other threads read it without a lock.
        self._running: _Running = (None, (), frozenset(), time.monotonic())
        # A thread that waits in a collective cannot be ended, so it must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"{name}-{device}", daemon=True)
        self._thread.start()

    def put(self, done: Outcome, task: Callable[[], Any]) -> None:
        """Queue a task; its result or error completes `done`."""
        self._tasks.put((done, task))

    @staticmethod
    def put_together(threads: Sequence[DeviceThread], tasks: Sequence[Task]) -> None:
        """Queue a task for each of several devices.

        Between two of them, the garbage collector runs no finaliser of a user, which may execute a program:
        devices would then meet in that one and in the first in different orders.
        """
        puts = [thread._tasks.put for thread in threads]
        # `deque` makes the calls in C, where Python collects nothing.
        deque(map(operator.call, puts, tasks), maxlen=0)

    def run(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue a call, and return the future of its result."""
        done: Future[Any] = Future()
        self.put(done, lambda: task(*arguments))
        return done

    def enter(
        self, program: str, collectives: tuple[str, ...], groups: frozenset[frozenset[int]] = frozenset()
    ) -> None:
        """Record the program that starts now; the task that runs it calls this, on the device's thread."""
        self._running = (program, collectives, groups, time.monotonic())

    @property
    def activity(self) -> DeviceActivity:
        """What the device is doing now."""
        program, collectives, groups, since = self._running
        return DeviceActivity(self._device, program, collectives, time.monotonic() - since, groups)

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            done, task = item
            complete(done, task)
            if self._running[0] is not None:
                self._running = (None, (), frozenset(), time.monotonic())
            # While the thread waits for the next task, its frame must not keep the last results alive.
            del item, done, task

    def close(self, timeout_s: float) -> None:
        """Run what is queued, then end; wait for the thread at most `timeout_s` seconds."""
        self._tasks.put(None)
        self._thread.join(timeout_s)


def is_finished(threads: Iterable[DeviceThread], timeout_s: float) -> bool:
    """Wait for a marker task that is queued behind all other work of each thread."""
    return not wait([thread.run(int) for thread in threads], timeout_s).not_done


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of a program on one device.

    Attributes:
        executable: the program.
        device: index of the device.
        values: the program's arguments.
        keep: indices of arguments that must not be donated.
        results: the program's results, of the group `done`.
        done: completes when the program has ended.
    """

    executable: Executable
    device: int
    values: Sequence[FutureLike]
    keep: frozenset[int]
    results: Sequence[GroupedFuture]
    done: Future[None]


MakeTask = Callable[[Execution], Task]
"""Returns the task that runs an execution on the thread of its device."""


class LocalEngine(Engine):
    """An engine on devices of this process, each of which has a thread that runs its programs in order.

    A subclass has the devices' client: it makes and reads arrays, and runs programs. Its constructor sets
    `_compiler` and `_progress`, and may end with `_start_watchdog`.

    Args:
        settings: of the job.
        devices: all devices of the job, by index.
        counts_memory: whether the devices' memory is counted here; otherwise the client counts it.
    """

    _compiler: CompileOnce
    _progress: JobProgress

    def __init__(
        self, settings: BridgeSettings, devices: tuple[EngineDevice, ...], *, counts_memory: bool = True
    ) -> None:
        self.platform = settings.platform
        self.process_index = settings.process
        self.devices = devices
        self._settings = settings
        self._threads = {device.index: DeviceThread(device.index) for device in devices if device.is_local}
        # The replicas share the memory of their machine equally.
        each = settings.memory_bytes or machine_bytes() // settings.replicas
        self._accounts = {
            index: MemoryAccount(each, settings.is_memory_limited) for index in self._threads if counts_memory
        }
        # The lock keeps one order on all devices: two programs that meet in different orders would deadlock.
        # It is reentrant, because the garbage collector may run a user's finaliser in a thread that holds it,
        # and the finaliser may execute a program.
        self._order = threading.RLock()
        self._is_closed = False
        self._watchdog: StallWatchdog | None = None

    def _start_watchdog(self) -> None:
        """Watch the devices. The thread calls the engine as soon as it starts, so call this last."""
        self._watchdog = StallWatchdog(self, self._progress, self._is_busy, self._settings.stall_timeout_s)

    def _is_busy(self) -> bool:
        """Return whether this process compiles, or computes where the watchdog cannot see it."""
        return self._compiler.is_compiling

    @property
    def compiles(self) -> int:
        """Number of programs that this process compiled."""
        return self._compiler.compiles

    @property
    def cache(self) -> ProgramCache:
        """The compilation cache, and its hits and misses."""
        return self._compiler.cache

    def compile(self, hlo: bytes, options: bytes) -> Executable:
        """Compile a program once for all replicas; different programs compile at the same time.

        Raises:
            PjrtError: it cannot be compiled, or the limit of a device's memory is enforced here and it needs
                more.
        """
        try:
            if self._settings.has_tpu_numerics:
                hlo = numerics.as_on_tpu(hlo)
            executable = self._compiler.compile(hlo, options)
            for account in self._accounts.values():
                account.check(executable.native["memory"], executable.name)
        except Exception as error:
            keep_first(error)
            raise
        return executable

    def serialize(self, executable: Executable) -> bytes:
        """Return the program in the compiler's format, with a header for what that format lacks."""
        return self._compiler.serialize(executable)

    def deserialize(self, data: bytes) -> Executable:
        """Load what `serialize` returned, in any process with the same compiler and as many devices."""
        return self._compiler.deserialize(data)

    def temporary_bytes(self, executable: Executable) -> int:
        """Return the size that the compiler has found."""
        needs: MemoryNeeds = executable.native["memory"]
        return needs.temporary

    def execute(
        self,
        executable: Executable,
        device: EngineDevice,
        arguments: Sequence[Buffer],
        keep: frozenset[int] = frozenset(),
    ) -> list[Buffer]:
        """Queue one execution on the device's thread."""
        executable.check_whole()
        with self._order:
            task, results = self._prepare(executable, device, arguments, keep, self._task)
            self._threads[device.index].put(*task)
            return results

    def execute_partitioned(
        self,
        executable: Executable,
        arguments: Sequence[Sequence[Buffer]],
        keep: frozenset[int] = frozenset(),
    ) -> list[list[Buffer]]:
        """Queue one execution on the thread of each local device that runs the program.

        Raises:
            PjrtError: an argument is not the part of an array that the program was compiled for. XLA's
                clients only compare sizes, and would take another part of the same size.
        """
        for row in arguments:
            executable.check([argument.type for argument in row])
        local = [device for device in self.devices if device.is_local and executable.runs_on(device.index)]
        make = self._make_together([device.index for device in local], arguments)
        with self._order:
            prepared = [
                self._prepare(executable, device, row, keep, make)
                for device, row in zip(local, arguments, strict=True)
            ]
            threads = [self._threads[device.index] for device in local]
            DeviceThread.put_together(threads, [task for task, _ in prepared])
            return [results for _, results in prepared]

    def _prepare(
        self,
        executable: Executable,
        device: EngineDevice,
        arguments: Sequence[Buffer],
        keep: frozenset[int],
        make: MakeTask,
    ) -> tuple[Task, list[Buffer]]:
        """Return the task of an execution, and its results; the arguments that it donates are gone."""
        done: Future[None] = Future()
        results = [GroupedFuture(done) for _ in executable.outputs]
        # Read the values now, because `give_up` below replaces those of donated arguments.
        values = [argument.value for argument in arguments]
        task = make(Execution(executable, device.index, values, keep, results, done))
        for number in executable.native["donated"] - keep:
            arguments[number].give_up("was donated to a program")
        return task, [
            Buffer(type_, device, result) for type_, result in zip(executable.outputs, results, strict=True)
        ]

    @abstractmethod
    def _task(self, execution: Execution) -> Task:
        """Return the task that runs an execution on the thread of its device."""

    @abstractmethod
    def _make_together(self, devices: Sequence[int], arguments: Sequence[Sequence[Buffer]]) -> MakeTask:
        """Return what makes the tasks of one partitioned program, which all start or all fail.

        Args:
            devices: indices of the local devices that run it.
            arguments: the arguments of each of them.
        """

    def _make(self, device: int, type_: ArrayType, make: Callable[[], _Array]) -> _Array:
        """Make an array that is counted, if arrays are counted here."""
        account = self._accounts.get(device)
        if account is None:
            return make()
        return account.make(type_.size_bytes, f"an array of shape {type_.dims} and dtype {type_.dtype}", make)

    def delete(self, buffer: Buffer) -> None:
        """Release the array; executions that are already queued still use it."""
        # A queued execution has the array's future, which `give_up` does not touch.
        buffer.give_up("was deleted")

    def memory_stats(self, device: EngineDevice) -> Mapping[str, int]:
        """Return the memory of the device's live arrays, if it is counted here."""
        account = self._accounts.get(device.index)
        return account.stats() if account else {}

    def reset_memory_peak(self, device: EngineDevice) -> None:
        """Restart the peak, if it is counted here."""
        if device.index not in self._accounts:
            super().reset_memory_peak(device)
        self._accounts[device.index].reset_peak()

    def activities(self) -> list[DeviceActivity]:
        """Return what each local device is doing."""
        return [thread.activity for thread in self._threads.values()]

    def retire(self, index: int) -> None:
        """Publish it from the device's thread, behind everything that is queued there."""
        self._threads[index].run(self._progress.retire, index)

    def finish(self, timeout_s: float) -> bool:
        """Wait until each device's thread has done what is queued there."""
        return is_finished(self._threads.values(), timeout_s)

    def close(self, timeout_s: float = FINISH_TIMEOUT_S, others_s: float = 0) -> None:
        """Finish the queued work, then release the arrays, the programs and the client.

        Raises:
            PjrtError: a program did not end in time, and its device keeps running; or another process did not
                end.
        """
        with self._order:
            if self._is_closed:
                return
            self._is_closed = True
        # Each device publishes its return when its own work is done, not when that of all devices here is.
        for index in self._threads:
            self.retire(index)
        is_unfinished = not self.finish(timeout_s)
        # Until here the watchdog could still report that a queued program is stuck.
        if self._watchdog is not None:
            self._watchdog.close()
        if is_unfinished:
            # The queued programs may wait for other processes, which need not wait for this one. So publish
            # ahead of the queue.
            for index in self._threads:
                self._progress.retire(index)
        self._stop(is_unfinished=is_unfinished)
        self._compiler.close()
        # The client must stay while a program still runs on it.
        if is_unfinished:
            raise self.unfinished(timeout_s)
        if self.cache.hits + self.cache.misses and self.process_index == 0:
            _log.info("%s", self.cache)
        self._release(others_s)

    @abstractmethod
    def _stop(self, *, is_unfinished: bool) -> None:
        """End what runs beside the devices' programs, and the waits of programs that never start."""

    @abstractmethod
    def _release(self, others_s: float) -> None:
        """Release the client; `others_s` is that of `close`."""
