"""`RecordingEngine`: records the programs of a job, and computes only the small ones. Imports jax."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxlib import xla_client

from polyxla_bridge.abi import Code, width
from polyxla_bridge.engine.clients import numpy_dtype
from polyxla_bridge.engine.engine import FINISH_TIMEOUT_S, Buffer, EngineDevice
from polyxla_bridge.engine.futures import CompletedFuture, FutureLike
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.engine.memory_accounting import MemoryNeeds
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo, kernels
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_bridge.programs.recording import ProgramRecorder

LARGE_BYTES = 64 << 20
"""Size of a large array, and of all arrays of a large program together: the programs that frameworks use to
agree and to exchange objects are smaller, and so are the training steps of small models."""


class RecordingEngine(JaxEngine):
    """Records the programs that it is asked to compile and execute, and computes the small ones.

    Large programs are not executed: their results are zeros that take no memory, and so are large arrays from
    the host. They are not compiled either, unless they are partitioned: then the compiler chooses the shapes
    of the parts. So a job that no CPU could compute can be studied, with the control flow of a real one.

    Args:
        settings: as for `JaxEngine`; programs are recorded in ``settings.programs_path``.
        on_lookup: as for `JaxEngine`.
    """

    def __init__(self, settings: BridgeSettings, on_lookup: Callable[[bool], None] | None = None) -> None:
        # Make the recorder first: the clients meet in the next line, and then every process has a log.
        self._recorder = ProgramRecorder(Path(settings.programs_path), settings.process)
        super().__init__(settings, on_lookup)

    def compile(self, hlo_module: bytes, options: bytes) -> Executable:
        """Record the program; compile it if it will be computed."""
        fingerprint = hashlib.sha256(hlo_module + options).hexdigest()
        self._recorder.compiled(fingerprint, kernels.as_written(hlo_module), options)
        is_large = hlo.total_bytes(hlo_module) > LARGE_BYTES
        compile_options = xla_client.CompileOptions.ParseFromString(options)
        if is_large and compile_options.num_partitions == 1:
            return self._uncompiled(fingerprint, hlo_module, self._compiler.devices_of(compile_options))
        executable = super().compile(hlo_module, options)
        executable.native["is_computed"] = not is_large
        return executable

    def _uncompiled(self, fingerprint: str, hlo_module: bytes, devices: tuple[int, ...]) -> Executable:
        executable = Executable(
            name=hlo.module_name(hlo_module),
            outputs=tuple(ArrayType(dtype, dims) for dtype, dims in hlo.results(hlo_module)),
            num_replicas=len(devices or self.devices),
            optimized_hlo=hlo_module,
            code_size_bytes=0,
            fingerprint=fingerprint,
            devices=devices,
        )
        # Only the compiler knows what the program would need; 0 stands for that.
        executable.attach(None, MemoryNeeds(0, 0, 0))
        executable.native["is_computed"] = False
        return executable

    def _run(
        self, executable: Executable, index: int, values: Sequence[FutureLike], protected: frozenset[int]
    ) -> list[Any]:
        arguments = [value.result() for value in values]
        account = self._accounts[index]
        # Read the memory before the results are counted, because the log has what was in use at the start.
        in_use = account.stats()["bytes_in_use"]
        self._recorder.executed(
            executable.fingerprint, index, in_use, lambda: map(_type_of, account.arrays())
        )
        if not executable.native["is_computed"]:
            # The results stand for new memory, so the memory that a real program would reuse is given up.
            for number in executable.native["donated"] - protected:
                account.take(arguments[number])
            return self._zeros(index, executable.outputs)
        # A small program may get the small results of a large one, which are not arrays of jaxlib.
        present = [self._present(array, index) for array in arguments]
        return super()._run(executable, index, [CompletedFuture(array) for array in present], protected)

    def _zeros(self, index: int, types: Iterable[ArrayType]) -> list[Zeros]:
        """Make zeros that count as the memory that they stand for."""
        zeros = [Zeros(type_) for type_ in types]
        self._accounts[index].add(zeros)
        return zeros

    def _present(self, array: Any, index: int) -> Any:
        return self._put(index, array.type, np.asarray(array)) if isinstance(array, Zeros) else array

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Drop the data of a large array."""
        if _size(type_) > LARGE_BYTES:
            (zeros,) = self._zeros(device.index, [type_])
            return Buffer(type_, device, CompletedFuture(zeros))
        return super().from_host(device, type_, data)

    def serialize(self, executable: Executable) -> bytes:
        """Return a compiled program as `JaxEngine` does.

        Raises:
            PjrtError: the program was not compiled.
        """
        if executable.native["program"] is None:
            text = f"{executable.name} is recorded, but not compiled: it cannot be serialised"
            raise PjrtError(Code.UNIMPLEMENTED, text)
        return super().serialize(executable)

    def deserialize(self, data: bytes) -> Executable:
        """Refuse a program that the framework has kept, so that it asks for a compilation, which is recorded.

        Raises:
            PjrtError: always.
        """
        raise PjrtError(Code.UNIMPLEMENTED, "no compiled program is loaded while programs are recorded")

    def close(self, timeout_s: float = FINISH_TIMEOUT_S, others_s: float = 0) -> None:
        """Close the engine, then the log."""
        super().close(timeout_s, others_s)
        self._recorder.close()


class Zeros:
    """An array of zeros that takes no memory.

    Args:
        type_: its type.
    """

    def __init__(self, type_: ArrayType) -> None:
        self.type = type_

    def on_device_size_in_bytes(self) -> int:
        """Return the size of the array that it stands for."""
        return _size(self.type)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        # One zero with strides of 0 has any shape without taking its memory.
        return np.broadcast_to(np.zeros((), numpy_dtype(self.type.dtype)), self.type.dims)


def _size(type_: ArrayType) -> int:
    return math.prod(type_.dims) * width(type_.dtype)


def _type_of(array: Any) -> ArrayType:
    return array.type if isinstance(array, Zeros) else ArrayType(array.dtype.name, tuple(array.shape))
