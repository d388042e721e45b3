"""One start of a program on several devices, which the devices' threads join."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polyxla_bridge.abi import Code
from polyxla_bridge.engine.plugin_compiler import JointProgram, PluginCompiler, PluginProgram
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.plugin_client import buffers
from polyxla_bridge.plugin_client.buffers import DeviceArray, Event
from polyxla_bridge.plugin_client.client import PluginClient
from polyxla_bridge.programs.executable import ArrayType, Executable


@dataclass(frozen=True)
class StartRequest:
    """What one device contributes to a start.

    Attributes:
        executable: the program that the device is to run.
        arguments: the program's arguments.
        keep: indices of arguments that must not be donated.
    """

    executable: Executable
    arguments: Sequence[DeviceArray]
    keep: frozenset[int]


@dataclass(frozen=True)
class Started:
    """What one device gets from a start.

    Attributes:
        results: the program's, not computed yet.
        end: the event of its end.
    """

    results: Sequence[DeviceArray]
    end: Event


Start = Callable[[dict[int, StartRequest]], dict[int, Started]]
"""Starts a program on all devices, by index of the device."""


class Meeting:
    """The devices' threads meet here; the last thread that arrives starts the program for all.

    Args:
        devices: indices of the devices.
        start: called once, by one of the threads.
    """

    def __init__(self, devices: Sequence[int], start: Start) -> None:
        self._start = start
        self._missing = set(devices)
        self._requests: dict[int, StartRequest] = {}
        self._started: dict[int, Started] = {}
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    def join(self, device: int, request: StartRequest) -> Started:
        """Wait until all devices have come and the program has started; return this device's share.

        The wait has no deadline of its own: the watchdog reports a stall, and `give_up` ends the wait.

        Raises:
            Exception: the program did not start, or another device called `give_up`.
        """
        with self._lock:
            self._requests[device] = request
            self._missing.discard(device)
            is_last = not self._missing and not self._is_over.is_set()
        # Start without the lock, which `give_up` takes.
        if is_last:
            try:
                self._started = self._start(self._requests)
            except BaseException as error:
                self.give_up(error)
            # Otherwise this object would keep the arguments alive as long as the results.
            self._requests.clear()
            self._is_over.set()
        self._is_over.wait()
        if self._error is not None:
            raise self._error
        return self._started.pop(device)

    def give_up(self, error: BaseException) -> None:
        """Raise an error in the threads that wait, and in those that are still to come."""
        with self._lock:
            # Threads that have their results keep them, and later errors only follow from the first.
            if not self._is_over.is_set():
                self._error = error
                self._is_over.set()


class Meetings:
    """The meetings of devices that get their programs separately: the n-th programs of all devices meet.

    Args:
        devices: indices of the devices.
        start: starts a program on all of them.
    """

    def __init__(self, devices: Sequence[int], start: Start) -> None:
        self._devices = devices
        self._start = start
        self._numbers = {device: itertools.count() for device in devices}
        self._open: dict[int, tuple[Meeting, set[int]]] = {}
        self._is_over = False
        self._lock = threading.Lock()

    def next(self, device: int) -> Meeting:
        """Return the next meeting of a device, when that is to start its program.

        Raises:
            PjrtError: `give_up` was called.
        """
        with self._lock:
            number = next(self._numbers[device])
            meeting, expected = self._open.setdefault(
                number, (Meeting(self._devices, self._start), set(self._devices))
            )
            # The others have left, or will leave.
            if self._is_over:
                raise PjrtError(Code.CANCELLED, "the engine was closed")
            # Once every device has come, their threads keep the meeting alive.
            expected.discard(device)
            if not expected:
                del self._open[number]
            return meeting

    def give_up(self) -> None:
        """End the waits of all devices, and let no other begin."""
        with self._lock:
            self._is_over = True
            meetings = [meeting for meeting, _ in self._open.values()]
        for meeting in meetings:
            meeting.give_up(PjrtError(Code.CANCELLED, "the engine was closed"))


class JointStart:
    """Starts programs on all local devices.

    Args:
        client: of the devices.
        compiler: joins programs that differ.
    """

    def __init__(self, client: PluginClient, compiler: PluginCompiler) -> None:
        self._client = client
        self._compiler = compiler
        self._indices = {device.handle: index for index, device in enumerate(client.devices)}
        self._zeros: dict[tuple[int, ArrayType], DeviceArray] = {}

    def __call__(self, requests: dict[int, StartRequest]) -> dict[int, Started]:
        """Start the devices' programs, as one if they differ; return each device's share."""
        joint = self._compiler.join([requests[index].executable for index in sorted(requests)])
        program: PluginProgram = joint.executable.native["program"]
        # The program has its own order of the devices, in which it takes its arguments.
        order = [self._indices[handle] for handle in program.loaded.devices]
        rows = [self._arguments(joint, index, requests[index].arguments) for index in order]
        kept: frozenset[int] = frozenset().union(*(request.keep for request in requests.values()))
        # The indices to keep are those of the devices' own programs, and a joint program donates nothing.
        keep = frozenset() if joint.arguments else kept
        results, ends = program.loaded.launch(rows, program.sizes, keep, None)
        return {index: Started(row, end) for index, row, end in zip(order, results, ends, strict=True)}

    def _arguments(
        self, joint: JointProgram, index: int, arguments: Sequence[DeviceArray]
    ) -> Sequence[DeviceArray]:
        if not joint.arguments:
            return arguments
        return [
            self._zero(index, type_) if mine is None else arguments[mine]
            for mine, type_ in zip(joint.arguments[index], joint.executable.parameters, strict=True)
        ]

    def _zero(self, index: int, type_: ArrayType) -> DeviceArray:
        """Return an array for an argument that the device's own program does not have."""
        if (index, type_) not in self._zeros:
            data = memoryview(bytearray(type_.size_bytes))
            device = self._client.devices[index]
            self._zeros[index, type_] = buffers.put(self._client, device, type_.dtype, type_.dims, data)
        return self._zeros[index, type_]

    def close(self) -> None:
        """Release the arrays."""
        self._zeros.clear()
