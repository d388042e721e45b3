"""`PjrtEngine`: an engine on any PJRT plugin."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from polyxla_bridge.engine import memory_accounting, numbering
from polyxla_bridge.engine.device_thread import DeviceThread
from polyxla_bridge.engine.engine import FINISH_TIMEOUT_S, Buffer, DeviceActivity, Engine, EngineDevice
from polyxla_bridge.engine.futures import CompletedFuture, FutureLike, GroupedFuture, complete, set_values
from polyxla_bridge.engine.meeting import JointStart, Meeting, Meetings, Part, Started
from polyxla_bridge.engine.plugin_compiler import CPU, PluginCompiler, PluginProgram
from polyxla_bridge.engine.stall_watchdog import DeviceProgress, OwnProgress, StallWatchdog
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import keep_first
from polyxla_bridge.plugin_client import buffers, plugin
from polyxla_bridge.plugin_client.buffers import DeviceArray, Event
from polyxla_bridge.plugin_client.client import PluginClient, PluginDevice
from polyxla_bridge.plugin_client.plugin import Option
from polyxla_bridge.programs import cache
from polyxla_bridge.programs.executable import ArrayType, Executable

_log = logging.getLogger("polyxla.bridge")


class PjrtEngine(Engine):
    """Replicas on the devices of a PJRT plugin.

    Per device, one thread starts programs in the order of the calls, without waiting for them, and another
    waits for their ends.

    Args:
        settings: of the job. The plugin decides how many replicas there are, and which of them are here.
        library: the plugin's path; or its client, such as a share of one that stays open.
        options: the plugin's own options for a new client.
        on_lookup: called for each program that this process needs, with whether the compilation cache had it.
        progress: exchanges the replicas' progress with the job's other processes; without it, no stall is
            noticed if there are other processes.

    Raises:
        PjrtError: the plugin cannot be loaded, refuses an option, or finds no devices.
    """

    def __init__(
        self,
        settings: BridgeSettings,
        library: Path | PluginClient,
        options: Mapping[str, Option] | None = None,
        on_lookup: Callable[[bool], None] | None = None,
        progress: DeviceProgress | None = None,
    ) -> None:
        if isinstance(library, Path):
            library = PluginClient(plugin.load(library), options or {})
        self._client = library
        self.platform = settings.platform if settings.places else self._client.platform.upper()
        self.process_index = self._client.process_index
        self.devices = _devices(settings, self._client)
        self._settings = dataclasses.replace(settings, replicas=len(self.devices), process=self.process_index)
        local = [device.index for device in self.devices if device.is_local]
        self._starting = {index: DeviceThread(index) for index in local}
        self._ending = {index: DeviceThread(index) for index in local}
        self._readers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="polyxla-read")
        self._compiler = PluginCompiler(self._settings, self._client, on_lookup)
        self._joint_start = JointStart(self._client, self._compiler)
        self._meetings = Meetings(local, self._joint_start)
        # `execute_partitioned` holds the lock while it queues one execution on several devices.
        self._order = threading.Lock()
        self._is_closed = False
        self._accounts = self._make_accounts(local)
        self._progress = progress or OwnProgress()
        self._watchdog: StallWatchdog | None = None
        # The watchdog comes last, because its thread calls the engine as soon as it starts.
        if len(self.devices) > 1 and (progress or len(self.devices) == len(local)):
            self._watchdog = StallWatchdog(self, self._progress, self._is_busy, settings.stall_timeout_s)

    def _is_busy(self) -> bool:
        """Return whether this process compiles, or each device of the job works.

        Only a CPU shows whether a program computes or waits in a collective. An accelerator's program
        computes if no other replica is missing.
        """
        # Exchange even while this process compiles, because the others need to know what its devices do.
        all_work = self._progress.exchange(all(activity.program for activity in self.activities()))
        return self._compiler.is_compiling or (all_work and self._client.platform != CPU)

    def _make_accounts(self, local: Sequence[int]) -> dict[int, memory_accounting.MemoryAccount]:
        """Return an account for the memory of each device; none if the plugin counts the memory itself."""
        if self._client.memory_stats(self._client.devices[local[0]]) is not None:
            return {}
        settings = self._settings
        each = settings.memory_bytes or memory_accounting.machine_bytes() // len(self.devices)
        return {index: memory_accounting.MemoryAccount(each, settings.is_memory_limited) for index in local}

    @property
    def compiles(self) -> int:
        """Number of programs that this process compiled."""
        return self._compiler.compiles

    @property
    def cache(self) -> cache.ProgramCache:
        """The compilation cache, and its hits and misses."""
        return self._compiler.cache

    @property
    def live_buffers(self) -> int:
        """Number of the plugin's buffers that exist."""
        return self._client.live_buffers

    def compile(self, hlo: bytes, options: bytes) -> Executable:
        """Compile a program once for all replicas; different programs compile at the same time.

        Raises:
            PjrtError: the plugin's; or the memory of the devices is limited here, and the program needs more.
        """
        try:
            executable = self._compiler.compile(hlo, options)
            for account in self._accounts.values():
                account.check(executable.native["program"].memory, executable.name)
        except Exception as error:
            keep_first(error)
            raise
        return executable

    def execute(
        self,
        executable: Executable,
        device: EngineDevice,
        arguments: Sequence[Buffer],
        keep: frozenset[int] = frozenset(),
    ) -> list[Buffer]:
        """Queue one execution on the device's thread."""
        executable.check_whole()
        program: PluginProgram = executable.native["program"]
        meeting = self._meetings.next(device.index) if program.meets else None
        return self._queue(executable, device, arguments, keep, meeting)

    def execute_partitioned(
        self,
        executable: Executable,
        arguments: Sequence[Sequence[Buffer]],
        keep: frozenset[int] = frozenset(),
    ) -> list[list[Buffer]]:
        """Queue one execution on the thread of each local device.

        Raises:
            PjrtError: an argument is not the part of an array that the program was compiled for.
        """
        for row in arguments:
            executable.check([argument.type for argument in row])
        local = [device for device in self.devices if device.is_local]
        meeting = Meeting([device.index for device in local], self._joint_start)
        # The lock keeps one order on all devices: two programs that meet in different orders would deadlock.
        with self._order:
            return [
                self._queue(executable, device, row, keep, meeting)
                for device, row in zip(local, arguments, strict=True)
            ]

    def _queue(
        self,
        executable: Executable,
        device: EngineDevice,
        arguments: Sequence[Buffer],
        keep: frozenset[int],
        meeting: Meeting | None,
    ) -> list[Buffer]:
        program: PluginProgram = executable.native["program"]
        done: Future[None] = Future()
        results = [GroupedFuture(done) for _ in executable.outputs]
        outputs = [
            Buffer(type_, device, result) for type_, result in zip(executable.outputs, results, strict=True)
        ]
        # Read the values now, because `give_up` below replaces those of donated arguments.
        values = [argument.value for argument in arguments]

        def start() -> None:
            started = self._start(executable, device.index, values, keep, meeting)
            # The values must be set before `_end`, which may complete `done` at once.
            set_values(results, started.results)
            self._end(executable, device.index, started.end, done)

        self._starting[device.index].put(_Start(done), start)
        for number in program.donated - keep:
            arguments[number].give_up("was donated to a program")
        return outputs

    def _start(
        self,
        executable: Executable,
        index: int,
        values: Sequence[FutureLike],
        keep: frozenset[int],
        meeting: Meeting | None,
    ) -> Started:
        """Start a program on the thread of its device."""
        program: PluginProgram = executable.native["program"]
        try:
            executable.check_count(len(values))
            arrays = [_array(value) for value in values]
            # The thread may wait in the meeting, which the watchdog must see.
            self._starting[index].enter(executable.name, program.collectives, program.groups)
            return self._launch(index, Part(executable, arrays, keep), meeting)
        except BaseException as error:
            keep_first(error)
            # The program starts on all devices or on none, so the threads of the others must not wait.
            if meeting is not None:
                meeting.give_up(error)
            raise

    def _launch(self, index: int, part: Part, meeting: Meeting | None) -> Started:
        """Start a program, and count its memory; that of its temporary arrays until `_end`."""
        account = self._accounts.get(index)
        if account is None:
            return self._launch_uncounted(index, part, meeting)
        program: PluginProgram = part.executable.native["program"]
        # The plugin copies an argument that the program would reuse, but must keep.
        copied = sum(part.arguments[number].size for number in program.donated & part.keep)
        size = program.memory.own + copied
        if self._settings.is_memory_limited:
            # A device runs one program at a time, so the temporary arrays of the last program may share their
            # memory with those of this one. Wait until they are no longer counted.
            self._ending[index].run(int).result()
        account.reserve(size, f"program {part.executable.name}")
        try:
            started = self._launch_uncounted(index, part, meeting)
        except BaseException:
            account.release(size)
            raise
        # The results are counted as arrays from here on; `_end` releases the rest.
        account.release(size - program.memory.temporary)
        for number in program.donated - part.keep:
            account.take(part.arguments[number])
        account.add(list(started.results))
        return started

    def _launch_uncounted(self, index: int, part: Part, meeting: Meeting | None) -> Started:
        if meeting is not None:
            return meeting.join(index, part)
        program: PluginProgram = part.executable.native["program"]
        device = self._client.devices[index]
        ((results,), (end,)) = program.loaded.launch([part.arguments], program.sizes, part.keep, device)
        return Started(results, end)

    def _end(self, executable: Executable, index: int, end: Event, done: Future[None]) -> None:
        """Complete `done` when a program has ended."""
        program: PluginProgram = executable.native["program"]
        account = self._accounts.get(index)

        def wait_for_end() -> None:
            try:
                end.wait()
            finally:
                if account is not None:
                    account.release(program.memory.temporary)

        # A short program on a CPU has often ended already, and then needs no other thread.
        if end.is_ready:
            complete(done, wait_for_end)
            return
        thread = self._ending[index]

        def wait_on_thread() -> None:
            thread.enter(executable.name, program.collectives, program.groups)
            try:
                wait_for_end()
            except BaseException as error:
                keep_first(error)
                raise

        thread.put(done, wait_on_thread)

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Copy before returning."""
        self._client.check_open()
        to = self._client.devices[device.index]
        array = self._make(
            device, type_, lambda: buffers.put(self._client, to, type_.dtype, type_.dims, data)
        )
        return Buffer(type_, device, CompletedFuture(array))

    def _make(self, device: EngineDevice, type_: ArrayType, make: Callable[[], DeviceArray]) -> DeviceArray:
        """Make an array that is counted, if arrays are counted here."""
        account = self._accounts.get(device.index)
        if account is None:
            return make()
        what = f"an array of shape {type_.dims} and dtype {type_.dtype}"
        return account.make(type_.size_bytes, what, make)

    def to_host(self, buffer: Buffer, into: memoryview | None = None) -> Future[memoryview]:
        """Read the buffer as soon as it is computed."""
        done: Future[memoryview] = Future()
        rank = len(buffer.type.dims)

        def read(array: DeviceArray) -> None:
            view, arrived = array.read(rank, into)

            def take() -> memoryview:
                arrived.wait()
                return view

            # The calling thread may start a device's programs, so a read that is not ready waits elsewhere.
            if arrived.is_ready:
                complete(done, take)
            else:
                self._readers.submit(complete, done, take)

        self._when_started(buffer, read, done)
        return done

    def _when_started(self, buffer: Buffer, follow: Callable[[DeviceArray], None], done: Future[Any]) -> None:
        """Call `follow` with a buffer's array, before a later program can take its memory.

        The call happens at once if the array exists, computed or not, and otherwise on the thread that is
        going to start its program. An error goes to `done`.
        """
        value = buffer.value

        def call() -> None:
            try:
                follow(_array(value))
            except BaseException as error:
                done.set_exception(error)

        if isinstance(value, GroupedFuture) and value.early_value is None and not value.group.done():
            self._starting[buffer.device.index].put(Future(), call)
        else:
            call()

    def address(self, buffer: Buffer) -> int:
        """Return the plugin's own address of the array.

        Raises:
            PjrtError: it is not in the host's memory.
        """
        array: DeviceArray = buffer.value.result()
        if not array.is_on_cpu:
            return super().address(buffer)
        array.ready().wait()
        return array.address()

    def copy(self, buffer: Buffer, device: EngineDevice) -> Buffer:
        """Copy from device to device."""
        copied: Future[Any] = Future()

        def start(array: DeviceArray) -> None:
            to = self._client.devices[device.index]
            copied.set_result(self._make(device, buffer.type, lambda: array.copy(to)))

        self._when_started(buffer, start, copied)
        return Buffer(buffer.type, device, copied)

    def delete(self, buffer: Buffer) -> None:
        """Release the array; executions that are already queued still use it."""
        # A queued execution has the array's future, which `give_up` does not touch.
        buffer.give_up("was deleted")

    def serialize(self, executable: Executable) -> bytes:
        """Return the program in the plugin's format, with a header for what that format lacks."""
        return self._compiler.serialize(executable)

    def deserialize(self, data: bytes) -> Executable:
        """Load what `serialize` returned, in any process whose plugin is the same and has as many devices."""
        return self._compiler.deserialize(data)

    def temporary_bytes(self, executable: Executable) -> int:
        """Return the size that the plugin's compiler has found."""
        needs: memory_accounting.MemoryNeeds = executable.native["program"].memory
        return needs.temporary

    def memory_stats(self, device: EngineDevice) -> Mapping[str, int]:
        """Return the plugin's counters, or the memory of the device's live arrays if it has none."""
        if account := self._accounts.get(device.index):
            return account.stats()
        return self._client.memory_stats(self._client.devices[device.index]) or {}

    def reset_memory_peak(self, device: EngineDevice) -> None:
        """Restart the peak, if it is counted here."""
        if device.index not in self._accounts:
            super().reset_memory_peak(device)
        self._accounts[device.index].reset_peak()

    def activities(self) -> list[DeviceActivity]:
        """Return what each local device is doing: the program that it waits to start, or that it is in."""
        both = [(self._starting[index].activity, self._ending[index].activity) for index in self._starting]
        return [ending if ending.program else starting for starting, ending in both]

    def retire(self, index: int) -> None:
        """Publish it from the device's threads, behind everything that is queued there."""
        # When the starting thread runs this task, the other thread has the ends of all earlier programs.
        ending = self._ending[index]
        self._starting[index].run(ending.run, self._progress.retire, index)

    def finish(self, timeout_s: float) -> bool:
        """Wait for a marker task that is queued behind all other work of each device."""
        # The starting threads come first, because they queue the ends of programs on the others.
        for threads in (self._starting, self._ending):
            markers = [thread.run(int) for thread in threads.values()]
            if wait(markers, timeout_s).not_done:
                return False
        return True

    def close(self, timeout_s: float = FINISH_TIMEOUT_S, others_s: float = 0) -> None:
        """Finish the queued work, then destroy the plugin's programs, buffers and client, in this order.

        Raises:
            PjrtError: a program did not end in time; its device keeps running.
        """
        with self._order:
            if self._is_closed:
                return
            self._is_closed = True
        for index in self._starting:
            self.retire(index)
        unfinished = not self.finish(timeout_s)
        if self._watchdog is not None:
            self._watchdog.close()
        # A thread may wait in a meeting to which another device never comes.
        self._meetings.give_up()
        self._readers.shutdown(wait=not unfinished, cancel_futures=unfinished)
        self._compiler.close()
        self._joint_start.close()
        for thread in (*self._starting.values(), *self._ending.values()):
            thread.close(0 if unfinished else FINISH_TIMEOUT_S)
        # The client must stay while a program still runs on it.
        if unfinished:
            raise self.unfinished(timeout_s)
        if self.cache.hits + self.cache.misses and self.process_index == 0:
            _log.info("%s", self.cache)
        self._client.close()


class _Start:
    """The outcome of a start, which a thread completes like a future: only an error completes the results.

    Args:
        done: the results' future.
    """

    __slots__ = ("_done",)

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def set_result(self, _: None) -> None:
        """Do nothing: the results complete when the program ends."""

    def set_exception(self, error: BaseException) -> None:
        """Complete the results with an error."""
        self._done.set_exception(error)


def _array(value: FutureLike) -> DeviceArray:
    """Return an array that a program may use even before it is computed.

    Raises:
        Exception: the array could not be made, or is deleted.
    """
    if isinstance(value, GroupedFuture) and value.early_value is not None:
        started: DeviceArray = value.early_value
        return started
    array: DeviceArray = value.result()
    return array


def _devices(settings: BridgeSettings, client: PluginClient) -> tuple[EngineDevice, ...]:
    """Return a client's devices; if chips are emulated, as those chips."""
    found = tuple(_described(index, device) for index, device in enumerate(client.devices))
    if not settings.places:
        return found
    (share,) = numbering.by_coordinates({0: settings.places}).values()
    places = [place for _, place in sorted(zip(share.replicas, share.places, strict=True))]
    # The numbers of devices and chips may differ here; the caller then refuses the engine.
    return tuple(
        dataclasses.replace(device, kind=settings.kind, place=place, cores=settings.cores)
        for device, place in itertools.zip_longest(found, places[: len(found)])
    )


def _described(index: int, device: PluginDevice) -> EngineDevice:
    attributes = device.attributes
    coords = attributes.get("coords")
    place = (*coords, attributes.get("core_on_chip", 0)) if coords and len(coords) == 3 else None
    cores = attributes.get("num_cores", 1)
    return EngineDevice(index, device.process_index, device.is_local, device.kind, place, cores)
