"""`Engine`: the interface of a device behind torch_xla. The bridge exposes any engine through PJRT."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from polyxla_bridge.abi import Code
from polyxla_bridge.engine.futures import DeletedFuture, FutureLike
from polyxla_bridge.env import Coordinates
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType, Executable

FINISH_TIMEOUT_S = 60.0
"""Longest wait of `Engine.close` for the queued work, in seconds."""


@dataclass(frozen=True)
class EngineDevice:
    """One device of the job.

    Attributes:
        index: ``0 <= index < number of devices``; torch_xla's ordinal.
        process_index: the process that drives the device.
        is_local: whether that is this process.
        kind: device kind in the device attributes.
        place: where a TPU's device is; None on the CPU.
        cores: number of TensorCores that it is made of.
    """

    index: int
    process_index: int
    is_local: bool
    kind: str
    place: Coordinates | None = None
    cores: int = 1


@dataclass
class Buffer:
    """An array on a device, possibly not computed yet.

    Attributes:
        type: known before the array is computed.
        device: where the array is.
        value: completes with the engine's array object, or with the error that prevented it.
        is_deleted: whether the array was deleted or donated; its value must not be used any more.
    """

    type: ArrayType
    device: EngineDevice
    value: FutureLike
    is_deleted: bool = False

    def give_up(self, reason: str) -> None:
        """Release the array. Reading it raises an error with the first `reason` that was given."""
        # The bridge also deletes a buffer that was donated; only the first reason says what happened.
        if not self.is_deleted:
            self.is_deleted = True
            self.value = DeletedFuture(reason, self.type)


@dataclass(frozen=True)
class DeviceActivity:
    """What one local device is doing.

    Attributes:
        device: index of the device.
        program: name of the running program; None while the device is idle.
        collectives: kinds of collectives in that program.
        seconds: how long the program has been running, or the device idle.
        groups: groups of replicas that meet in that program; see `polyxla_bridge.programs.hlo.groups`.
    """

    device: int
    program: str | None
    collectives: tuple[str, ...]
    seconds: float
    groups: frozenset[frozenset[int]] = frozenset()

    def __str__(self) -> str:
        if self.program is None:
            return f"replica {self.device}: idle for {self.seconds:.1f} s"
        with_ = f" with {', '.join(self.collectives)}" if self.collectives else ""
        return f"replica {self.device}: in {self.program}{with_} for {self.seconds:.1f} s"


class Engine(ABC):
    """Compiles and runs XLA programs on devices. Any thread may call any method.

    Only `compile`, `deserialize`, `finish` and `close` block. All other methods return at once: an array may
    not be computed yet, and an error is raised where the array is read.

    Attributes:
        platform: platform name reported to torch_xla, ``CPU`` or ``TPU``.
        devices: all devices of the job, by index.
        process_index: index of this process.
    """

    platform: str
    devices: tuple[EngineDevice, ...]
    process_index: int

    @abstractmethod
    def compile(self, hlo: bytes, options: bytes) -> Executable:
        """Compile a program.

        Args:
            hlo: a serialised HloModuleProto.
            options: a serialised CompileOptionsProto.

        Raises:
            Exception: any error of the compiler.
        """

    @abstractmethod
    def execute(
        self,
        executable: Executable,
        device: EngineDevice,
        arguments: Sequence[Buffer],
        keep: frozenset[int] = frozenset(),
    ) -> list[Buffer]:
        """Queue a program on one local device, and return the buffers of its results.

        Executions on one device run in the order of the calls. Donated arguments, whose memory the program
        reuses for its results, are deleted from then on.

        Args:
            executable: the program.
            device: the local device that runs it.
            arguments: its arguments, all on that device.
            keep: indices of arguments that must not be donated.
        """

    def execute_partitioned(
        self,
        executable: Executable,
        arguments: Sequence[Sequence[Buffer]],
        keep: frozenset[int] = frozenset(),
    ) -> list[list[Buffer]]:
        """Queue a partitioned program on its local devices, and return the buffers of each one's results.

        Like `execute` in everything else. An engine without partitioned programs need not implement it.

        Args:
            executable: the program.
            arguments: the arguments of each local device that runs it, by index of the device.
            keep: indices of arguments that must not be donated.
        """
        raise PjrtError(Code.UNIMPLEMENTED, f"{type(self).__name__} runs no partitioned programs")

    @abstractmethod
    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Bring dense row-major bytes to a device.

        The engine may use the memory of `data` itself, or read it later. So nothing may change the bytes as
        long as the engine refers to them.
        """

    @abstractmethod
    def to_host(self, buffer: Buffer, into: memoryview | None = None) -> Future[memoryview]:
        """Return the future of a buffer's bytes, dense and row-major.

        Args:
            buffer: the buffer.
            into: memory of the same size, to which the bytes are written, and which is the future's value; it
                must stay until the future is done. None to let the engine choose.
        """

    def address(self, buffer: Buffer) -> int:
        """Return where a buffer's bytes are in this process's memory, once it is computed.

        Raises:
            PjrtError: they are not in this process.
        """
        raise PjrtError(Code.UNIMPLEMENTED, f"the arrays of {type(self).__name__} are in another process")

    @abstractmethod
    def copy(self, buffer: Buffer, device: EngineDevice) -> Buffer:
        """Copy a buffer to another local device."""

    def receive(self, device: EngineDevice, type_: ArrayType) -> tuple[Buffer, bytes]:
        """Return a new buffer, and the descriptor by which another process can `send` its array.

        Raises:
            PjrtError: the engine's processes send each other no arrays.
        """
        raise PjrtError(Code.UNIMPLEMENTED, f"{type(self).__name__} receives no arrays of other processes")

    def send(self, buffer: Buffer, descriptor: bytes) -> Future[None]:
        """Send an array to the process whose `receive` has returned the descriptor.

        Raises:
            PjrtError: the engine's processes send each other no arrays.
        """
        raise PjrtError(Code.UNIMPLEMENTED, f"{type(self).__name__} sends no arrays to other processes")

    @abstractmethod
    def delete(self, buffer: Buffer) -> None:
        """Free a buffer's memory as soon as no earlier call needs it."""

    @abstractmethod
    def serialize(self, executable: Executable) -> bytes:
        """Return a compiled program as bytes that `deserialize` of the same version loads."""

    @abstractmethod
    def deserialize(self, data: bytes) -> Executable:
        """Load a compiled program.

        Raises:
            PjrtError: the bytes are not a program that this engine can load.
        """

    def temporary_bytes(self, executable: Executable) -> int:
        """Return the memory of the arrays that exist on a device only while a program runs; 0 if unknown."""
        return 0

    @abstractmethod
    def memory_stats(self, device: EngineDevice) -> Mapping[str, int]:
        """Return memory counters under PJRT's names, as far as they are known: bytes in use, peak, limit."""

    def reset_memory_peak(self, device: EngineDevice) -> None:
        """Restart the peak in `memory_stats` at the bytes in use. Only TorchTPU calls this."""
        raise PjrtError(Code.UNIMPLEMENTED, f"{type(self).__name__} cannot reset the peak of its memory")

    def activities(self) -> list[DeviceActivity]:
        """Return what each local device is doing; empty if the engine does not know."""
        return []

    def start_profile(self) -> None:  # noqa: B027  (an engine may have no operations in this process)
        """Start to record the operations of the local devices."""

    def stop_profile(self) -> bytes:
        """Stop recording; return the profile as a serialised XSpace, empty by default."""
        return b""

    def retire(self, index: int) -> None:  # noqa: B027  (an engine without a watchdog needs none)
        """Publish that a local device will run no more programs, once its queued work is done."""

    @abstractmethod
    def finish(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the queued work; return whether it is done."""

    def unfinished(self, seconds: float) -> PjrtError:
        """Return the error for work that had not ended when `close` had waited for `seconds`."""
        where = "; ".join(str(activity) for activity in self.activities())
        return PjrtError(
            Code.DEADLINE_EXCEEDED,
            f"the engine was closed, but had not finished after {seconds:g} s: {where}",
        )

    def stay(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds until every replica of the job has returned, as those here have.

        A replica that waits for a replica of this process can report that only while the process exists.
        After that, its collective fails with an error about a closed connection. Engines whose clients are in
        another process do nothing.
        """
        return

    @abstractmethod
    def close(self, timeout_s: float = FINISH_TIMEOUT_S, others_s: float = 0) -> None:
        """Finish the queued work, then release all devices; a second call does nothing.

        Args:
            timeout_s: longest wait for the queued work, in seconds.
            others_s: longest wait of process 0 for the job's other processes to end first, in seconds.

        Raises:
            PjrtError: a program, or another process, did not end in time.
        """
