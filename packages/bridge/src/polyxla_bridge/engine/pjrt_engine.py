"""`PjrtEngine`: an engine on any PJRT plugin."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from polyxla_bridge.engine import numbering
from polyxla_bridge.engine.engine import FINISH_TIMEOUT_S, Buffer, DeviceActivity, EngineDevice
from polyxla_bridge.engine.futures import CompletedFuture, FutureLike, GroupedFuture, complete, set_values
from polyxla_bridge.engine.local_engine import (
    DeviceThread,
    Execution,
    LocalEngine,
    MakeTask,
    Task,
    is_finished,
)
from polyxla_bridge.engine.meeting import JointStart, Meeting, Meetings, Started, StartRequest
from polyxla_bridge.engine.memory_accounting import MemoryNeeds
from polyxla_bridge.engine.plugin_compiler import CPU, PluginCompiler, PluginProgram
from polyxla_bridge.engine.stall_watchdog import DeviceProgress, OwnProgress
from polyxla_bridge.env import BridgeSettings, Coordinates
from polyxla_bridge.errors import keep_first
from polyxla_bridge.plugin_client import buffers, plugin
from polyxla_bridge.plugin_client.buffers import DeviceArray, Event
from polyxla_bridge.plugin_client.client import PluginClient, PluginDevice
from polyxla_bridge.plugin_client.plugin import Option
from polyxla_bridge.programs.executable import ArrayType, Executable


class PjrtEngine(LocalEngine):
    """Replicas on the devices of a PJRT plugin.

    Per device, one thread starts programs in the order of the calls, without waiting for them, another waits
    for their ends, and a third for what is read.

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

    _progress: DeviceProgress

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
        devices = _devices(settings, library)
        platform = settings.platform if settings.places else library.platform.upper()
        settings = dataclasses.replace(
            settings, replicas=len(devices), process=library.process_index, platform=platform
        )
        # A plugin that counts the memory itself also limits it.
        first = next(number for number, device in enumerate(devices) if device.is_local)
        counts_memory = library.memory_stats(library.devices[first]) is None
        super().__init__(settings, devices, counts_memory=counts_memory)
        self._ending = {index: DeviceThread(index) for index in self._threads}
        # A read may wait until another device starts a program, perhaps only after a read of its own.
        self._reading = {index: DeviceThread(index, "polyxla-read") for index in self._threads}
        self._compiler = compiler = PluginCompiler(settings, library, on_lookup)
        self._joint_start = JointStart(library, compiler)
        # XLA's CPU client runs all devices on a few threads. Where programs wait on all of them for the other
        # devices, these never get one. So the devices meet only when the last program has ended.
        self._last_ends: dict[int, Future[None]] = {}
        self._meetings = Meetings(list(self._threads), self._joint_start)
        self._progress = progress or OwnProgress()
        if len(devices) > 1 and (progress or len(devices) == len(self._threads)):
            self._start_watchdog()

    def _is_busy(self) -> bool:
        """Return whether this process compiles, or each device of the job works.

        Only a CPU shows whether a program computes or waits in a collective. An accelerator's program
        computes if no other replica is missing.
        """
        # Exchange even while this process compiles, because the others need to know what its devices do.
        all_work = self._progress.exchange(all(activity.program for activity in self.activities()))
        return super()._is_busy() or (all_work and self._client.platform != CPU)

    @property
    def live_buffers(self) -> int:
        """Number of the plugin's buffers that exist."""
        return self._client.live_buffers

    def _task(self, execution: Execution, meeting: Meeting | None = None) -> Task:
        def start() -> None:
            started = self._start(execution, meeting)
            # The values must be set before `_end`, which may complete `done` at once.
            set_values(execution.results, started.results)
            self._end(execution.executable, execution.device, started.end, execution.done)

        return _Start(execution.done), start

    def _make_together(self, devices: Sequence[int], arguments: Sequence[Sequence[Buffer]]) -> MakeTask:
        return functools.partial(self._task, meeting=Meeting(devices, self._joint_start))

    def _start(self, execution: Execution, meeting: Meeting | None) -> Started:
        """Start a program on the thread of its device."""
        executable, index = execution.executable, execution.device
        native = executable.native
        # Only the device's thread takes the numbers of its meetings, so they are in the order of the queue.
        if meeting is None and native["program"].meets:
            meeting = self._meetings.next(index)
        try:
            executable.check_count(len(execution.values))
            arrays = [_array(value) for value in execution.values]
            # The thread may wait in the meeting, which the watchdog must see.
            self._threads[index].enter(executable.name, native["collectives"], native["groups"])
            return self._launch(index, StartRequest(executable, arrays, execution.keep), meeting)
        except BaseException as error:
            keep_first(error)
            # The program starts on all devices or on none, so the threads of the others must not wait.
            if meeting is not None:
                meeting.give_up(error)
            raise

    def _launch(self, index: int, request: StartRequest, meeting: Meeting | None) -> Started:
        """Start a program, and count its memory; that of its temporary arrays until `_end`."""
        account = self._accounts.get(index)
        if account is None:
            return self._launch_uncounted(index, request, meeting)
        donated: frozenset[int] = request.executable.native["donated"]
        needs: MemoryNeeds = request.executable.native["memory"]
        # The plugin copies an argument that the program would reuse, but must keep.
        copied = sum(request.arguments[number].size for number in donated & request.keep)
        size = needs.own + copied
        if self._settings.is_memory_limited:
            # A device runs one program at a time, so the temporary arrays of the last program may share their
            # memory with those of this one. Wait until they are no longer counted.
            self._ending[index].run(int).result()
        account.reserve(size, f"program {request.executable.name}")
        try:
            started = self._launch_uncounted(index, request, meeting)
        except BaseException:
            account.release(size)
            raise
        for number in donated - request.keep:
            account.take(request.arguments[number])
        # The results are counted as arrays from here on; `_end` releases the rest.
        account.add(list(started.results), reserved=size - needs.temporary)
        return started

    def _launch_uncounted(self, index: int, request: StartRequest, meeting: Meeting | None) -> Started:
        if meeting is not None:
            if index in self._last_ends:
                self._last_ends.pop(index).exception()
            return meeting.join(index, request)
        program: PluginProgram = request.executable.native["program"]
        device = self._client.devices[index]
        ((results,), (end,)) = program.loaded.launch([request.arguments], program.sizes, request.keep, device)
        return Started(results, end)

    def _end(self, executable: Executable, index: int, end: Event, done: Future[None]) -> None:
        """Complete `done` when a program has ended."""
        native, account = executable.native, self._accounts.get(index)

        def wait_for_end() -> None:
            try:
                end.wait()
            finally:
                if account is not None:
                    account.release(native["memory"].temporary)

        # A short program on a CPU has often ended already, and then needs no other thread.
        if end.is_ready:
            complete(done, wait_for_end)
            return
        thread = self._ending[index]

        def wait_on_thread() -> None:
            thread.enter(executable.name, native["collectives"], native["groups"])
            try:
                wait_for_end()
            except BaseException as error:
                keep_first(error)
                raise

        thread.put(done, wait_on_thread)
        if self._client.platform == CPU:
            self._last_ends[index] = done

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Copy before returning."""
        self._client.check_open()
        to = self._client.devices[device.index]
        array = self._make(
            device.index, type_, lambda: buffers.put(self._client, to, type_.dtype, type_.dims, data)
        )
        return Buffer(type_, device, CompletedFuture(array))

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
                self._reading[buffer.device.index].put(done, take)

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
            self._threads[buffer.device.index].put(Future(), call)
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
            copied.set_result(self._make(device.index, buffer.type, lambda: array.copy(to)))

        self._when_started(buffer, start, copied)
        return Buffer(buffer.type, device, copied)

    def memory_stats(self, device: EngineDevice) -> Mapping[str, int]:
        """Return the plugin's counters, or the memory of the device's live arrays if it has none."""
        found = super().memory_stats(device)
        return found or self._client.memory_stats(self._client.devices[device.index]) or {}

    def activities(self) -> list[DeviceActivity]:
        """Return what each local device is doing: the program that it waits to start, or that it is in."""
        ending = [thread.activity for thread in self._ending.values()]
        both = zip(super().activities(), ending, strict=True)
        return [last if last.program else waiting for waiting, last in both]

    def retire(self, index: int) -> None:
        """Publish it from the device's threads, behind everything that is queued there."""
        # When the starting thread runs this task, the other thread has the ends of all earlier programs.
        self._threads[index].run(self._ending[index].run, self._progress.retire, index)

    def finish(self, timeout_s: float) -> bool:
        """Wait until the threads have started what is queued, then for the ends of the programs."""
        return super().finish(timeout_s) and is_finished(self._ending.values(), timeout_s)

    def _stop(self, *, is_unfinished: bool) -> None:
        # A thread may wait in a meeting to which another device never comes.
        self._meetings.give_up()
        for threads in (self._threads, self._ending, self._reading):
            for thread in threads.values():
                thread.close(0 if is_unfinished else FINISH_TIMEOUT_S)
        self._joint_start.close()

    def _release(self, others_s: float) -> None:
        """Destroy the plugin's programs, buffers and client, in this order."""
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
    place = None
    if coords and len(coords) == 3:
        x, y, z = coords
        place = Coordinates(x, y, z, attributes.get("core_on_chip", 0), attributes.get("slice_index"))
    cores = attributes.get("num_cores", 1)
    return EngineDevice(index, device.process_index, device.is_local, device.kind, place, cores)
