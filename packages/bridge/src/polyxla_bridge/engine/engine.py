"""`Engine`: what a device behind torch_xla must be able to do. The bridge shows any of them as PJRT."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from polyxla_bridge.engine.futures import Gone, Promise


@dataclass(frozen=True)
class EngineDevice:
    """One device of the job.

    Attributes:
        index: its number, ``0 <= index < number of devices``; torch_xla's ordinal.
        process_index: the process that drives it.
        is_local: whether that is this process.
        kind: what to call it in device attributes.
    """

    index: int
    process_index: int
    is_local: bool
    kind: str


@dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of an array.

    Attributes:
        dtype: numpy's or ml_dtypes' name, one of `polyxla_bridge.table.abi.DTYPES`.
        dims: its sizes; empty for a scalar.
    """

    dtype: str
    dims: tuple[int, ...]


@dataclass
class Buffer:
    """An array on a device, or the promise of one.

    Attributes:
        type: known before the array is.
        device: where it lives.
        value: completes with the engine's own array, or with the error that kept it from being made.
        is_deleted: whether it was given up; its value must not be used any more.
    """

    type: ArrayType
    device: EngineDevice
    value: Promise
    is_deleted: bool = False

    def give_up(self, why: str) -> None:
        """Let go of the array: whoever reads it from now on is told why; the first reason counts."""
        if not self.is_deleted:
            self.is_deleted = True
            self.value = Gone(why, self.type)


@dataclass
class Executable:
    """A compiled program.

    Attributes:
        name: the HLO module's name.
        outputs: the types of its results.
        num_replicas: how many replicas it was compiled for.
        optimized_hlo: the optimised program, a serialised HloModuleProto.
        code_size_bytes: size of the generated code.
        fingerprint: the same for the same program and options.
        native: the engine's own objects.
    """

    name: str
    outputs: tuple[ArrayType, ...]
    num_replicas: int
    optimized_hlo: bytes
    code_size_bytes: int
    fingerprint: str
    native: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Position:
    """What one local device does.

    Attributes:
        device: its number.
        program: the program that runs on it; None while it is idle.
        collectives: the kinds of collectives in that program.
        seconds: since when it runs, or is idle.
    """

    device: int
    program: str | None
    collectives: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        if self.program is None:
            return f"replica {self.device}: idle for {self.seconds:.1f} s"
        with_ = f" with {', '.join(self.collectives)}" if self.collectives else ""
        return f"replica {self.device}: in {self.program}{with_} for {self.seconds:.1f} s"


class Engine(ABC):
    """Compiles and runs XLA programs on devices. Every method may be called from any thread.

    Nothing but `compile`, `deserialize` and `close` waits: arrays are promised, and errors surface
    where the array is read.

    Attributes:
        platform: what torch_xla calls the hardware, ``CPU`` or ``TPU``.
        devices: all devices of the job, by index.
        process_index: this process's number.
    """

    platform: str
    devices: tuple[EngineDevice, ...]
    process_index: int

    @abstractmethod
    def compile(self, hlo: bytes, options: bytes) -> Executable:
        """Compile a serialised HloModuleProto under serialised CompileOptionsProto.

        Raises:
            Exception: what the compiler says.
        """

    @abstractmethod
    def execute(
        self,
        executable: Executable,
        device: EngineDevice,
        arguments: Sequence[Buffer],
        keep: frozenset[int] = frozenset(),
    ) -> list[Buffer]:
        """Run a program on one local device; its results are promised at once.

        Executions on one device happen in the order of the calls. Arguments whose memory the program
        gives to its results are deleted from then on, but for those whose numbers are in `keep`.
        """

    @abstractmethod
    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Copy dense row-major bytes to a device; `data` may be reused when this returns."""

    @abstractmethod
    def to_host(self, buffer: Buffer) -> Future[memoryview]:
        """Promise a buffer's bytes, dense and row-major."""

    @abstractmethod
    def copy(self, buffer: Buffer, device: EngineDevice) -> Buffer:
        """Copy a buffer to another local device."""

    @abstractmethod
    def delete(self, buffer: Buffer) -> None:
        """Free a buffer's memory once nothing that was already asked for needs it."""

    @abstractmethod
    def serialize(self, executable: Executable) -> bytes:
        """Return a compiled program as bytes that `deserialize` takes, in this version of the engine."""

    @abstractmethod
    def deserialize(self, data: bytes) -> Executable:
        """Load a compiled program.

        Raises:
            PjrtError: the bytes are not such a program.
        """

    @abstractmethod
    def memory_stats(self, device: EngineDevice) -> Mapping[str, int]:
        """Return bytes in use, at the peak and at the limit, under PJRT's names; what is known of them."""

    def positions(self) -> list[Position]:
        """Return what each local device does; nothing, where the engine does not know."""
        return []

    @abstractmethod
    def finish(self, timeout_s: float) -> bool:
        """Wait until what was asked for is done, at most `timeout_s` seconds; return whether it is."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was asked for, then let go of all devices."""
