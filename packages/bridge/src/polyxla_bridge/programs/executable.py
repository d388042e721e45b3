"""A compiled program, the types of its arrays, and its form as bytes.

The bytes have a header for what the compiler's format lacks, then that format:
``magic, length of the header, header (JSON), optimised HLO, the compiler's bytes, SHA-256 of all before``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polyxla_bridge
from polyxla_bridge import abi
from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo


@dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of an array.

    Attributes:
        dtype: name in numpy or ml_dtypes, one of `polyxla_bridge.abi.DTYPES`.
        dims: size of each dimension; empty for a scalar.
    """

    dtype: str
    dims: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Size of a dense array, in bytes."""
        return math.prod(self.dims) * abi.width(self.dtype)

    @property
    def memory(self) -> tuple[str, tuple[int, ...]]:
        """Equal for arrays that have the same numbers at the same places of their memory."""
        return self.dtype, tuple(size for size in self.dims if size != 1)


@dataclass
class Executable:
    """A compiled program.

    Attributes:
        name: name of the HLO module.
        outputs: types of the results on one device.
        num_replicas: number of replicas the program was compiled for.
        optimized_hlo: the optimised program, a serialised HloModuleProto.
        code_size_bytes: size of the generated code.
        fingerprint: equal for equal programs and options.
        num_partitions: number of devices that compute one replica of the program together.
        devices: indices of the devices that run it, in the order of the program's own numbers; empty for all
            of the job's, in their order.
        meets: what its devices do together; see `polyxla_bridge.programs.hlo.meets`.
        native: objects that the engine attaches; see `attach`.
    """

    name: str
    outputs: tuple[ArrayType, ...]
    num_replicas: int
    optimized_hlo: bytes
    code_size_bytes: int
    fingerprint: str
    num_partitions: int = 1
    devices: tuple[int, ...] = ()
    meets: tuple[hlo.Meet, ...] = ()
    native: dict[str, Any] = field(default_factory=dict)

    def attach(self, program: Any, memory: Any) -> None:
        """Attach what an engine needs to run the program.

        Args:
            program: the engine's own form of it.
            memory: what it needs on one device, `polyxla_bridge.engine.memory_accounting.MemoryNeeds`.
        """
        self.native["program"], self.native["memory"] = program, memory
        self.native["donated"] = hlo.donated(self.optimized_hlo)
        self.native["collectives"] = hlo.collectives(self.optimized_hlo)
        self.native["groups"] = self.groups()
        every = frozenset(self.devices or range(self.num_replicas * self.num_partitions))
        on_sockets = self._in_job(hlo.groups_on_sockets(self.optimized_hlo))
        self.native["groups_on_sockets"] = frozenset(group or every for group in on_sockets)

    def groups(self) -> frozenset[frozenset[int]]:
        """Return the groups of devices that meet in the program; see `polyxla_bridge.programs.hlo.groups`."""
        return self._in_job(hlo.groups(self.optimized_hlo))

    def _in_job(self, groups: frozenset[frozenset[int]]) -> frozenset[frozenset[int]]:
        """Return groups of the program's own numbers as groups of devices.

        A group without members stands for all of the job's.
        """
        if not self.devices:
            return groups
        # A group without members stands for all that run the program.
        every = range(len(self.devices))
        return frozenset(frozenset(self.devices[number] for number in group or every) for group in groups)

    def runs_on(self, index: int) -> bool:
        """Return whether a device runs the program."""
        return not self.devices or index in self.devices

    # Each execution compares its arguments with these, so the module is parsed only once.
    @functools.cached_property
    def parameters(self) -> list[ArrayType]:
        """Types of the arguments on one device."""
        return [ArrayType(dtype, dims) for dtype, dims in hlo.parameters(self.optimized_hlo)]

    def check(self, arguments: Sequence[ArrayType]) -> None:
        """Check the types of the arguments on one device.

        PJRT's own clients compare sizes in bytes only, and frameworks rely on it: TorchTPU passes an array of
        one number for a scalar. But those clients also accept another part of an array, of the same size.

        Raises:
            PjrtError: they do not have the memory of those that the program was compiled for.
        """
        self.check_count(len(arguments))
        for number, (given, wanted) in enumerate(zip(arguments, self.parameters, strict=True)):
            if given.memory != wanted.memory:
                raise PjrtError(
                    Code.INVALID_ARGUMENT, f"argument {number} of {self.name} must be {wanted}, not {given}"
                )

    def check_whole(self) -> None:
        """Check that one device alone can run the program.

        Raises:
            PjrtError: it is partitioned.
        """
        if self.num_partitions > 1:
            raise PjrtError(
                Code.UNIMPLEMENTED,
                f"{self.name} is partitioned (SPMD): one device alone cannot execute it",
            )

    def check_count(self, count: int) -> None:
        """Check the number of arguments on one device.

        Raises:
            PjrtError: the program takes another number.
        """
        if count != len(self.parameters):
            raise PjrtError(
                Code.INVALID_ARGUMENT, f"{self.name} takes {len(self.parameters)} arguments, not {count}"
            )


_MAGIC = b"polyxla program\n"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class UnpackedProgram:
    """The result of `unpack`.

    Attributes:
        executable: the program, without the engine's objects.
        native: the program in its compiler's format.
    """

    executable: Executable
    native: bytes


@functools.cache
def code_digest() -> str:
    """Return a digest of this package's code, which rewrites programs and chooses compiler options.

    A program that other code made may be wrong, even if a framework has kept it, as TorchTPU does.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(polyxla_bridge.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def pack(executable: Executable, native: bytes, compiler: str) -> bytes:
    """Return a program as bytes that `unpack` of the same code reads.

    Args:
        executable: the program.
        native: the program in its compiler's format.
        compiler: name and version.
    """
    header = {
        "code": code_digest(),
        "compiler": compiler,
        "name": executable.name,
        "outputs": [(output.dtype, output.dims) for output in executable.outputs],
        "num_replicas": executable.num_replicas,
        "num_partitions": executable.num_partitions,
        "devices": executable.devices,
        "meets": executable.meets,
        "code_size_bytes": executable.code_size_bytes,
        "fingerprint": executable.fingerprint,
        "optimized_hlo_bytes": len(executable.optimized_hlo),
    }
    text = json.dumps(header).encode()
    whole = b"".join((_MAGIC, _LENGTH.pack(len(text)), text, executable.optimized_hlo, native))
    return whole + hashlib.sha256(whole).digest()


def unpack(data: bytes, num_devices: int, compiler: str) -> UnpackedProgram:
    """Read what `pack` returned.

    Args:
        data: the bytes.
        num_devices: number of devices in this job; the program must be compiled for as many, or for some of
            them.
        compiler: name and version of the one that must have made the program.

    Raises:
        PjrtError: the bytes are not such a program, are damaged, or are of other code or another job.
    """
    if not data.startswith(_MAGIC):
        raise _refused("polyxla-bridge did not write these bytes")
    # The checksum is verified before anything is parsed: damage could make any value of the header wrong. A
    # view saves a copy of the program.
    whole = memoryview(data)[:-_DIGEST_BYTES]
    if hashlib.sha256(whole).digest() != data[-_DIGEST_BYTES:]:
        raise _refused(f"the checksum of its {len(data)} bytes is wrong, so it is damaged")
    start = len(_MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack(whole[len(_MAGIC) : start])
    header = json.loads(bytes(whole[start : start + length]))
    _check(header, num_devices, compiler)
    middle = start + length + header["optimized_hlo_bytes"]
    executable = Executable(
        name=header["name"],
        outputs=tuple(ArrayType(dtype, tuple(dims)) for dtype, dims in header["outputs"]),
        num_replicas=header["num_replicas"],
        optimized_hlo=bytes(whole[start + length : middle]),
        code_size_bytes=header["code_size_bytes"],
        fingerprint=header["fingerprint"],
        num_partitions=header["num_partitions"],
        devices=tuple(header["devices"]),
        meets=tuple((text, tuple(map(tuple, groups))) for text, groups in header["meets"]),
    )
    return UnpackedProgram(executable, bytes(whole[middle:]))


def _check(header: dict[str, Any], num_devices: int, compiler: str) -> None:
    name = header.get("name", "unnamed")
    expected = {"code": code_digest(), "compiler": compiler}
    for key, value in expected.items():
        if header[key] != value:
            raise _refused(f"{name} was made with {key} {header[key]}, and this is {key} {value}")
    # A program for chosen devices fits any job that has them. Any other is for all devices of a job, so their
    # number must be the same.
    if chosen := header["devices"]:
        fits, made_for = max(chosen) < num_devices, f"the devices {chosen}"
    else:
        count = header["num_replicas"] * header["num_partitions"]
        fits, made_for = count == num_devices, f"{count} devices"
    if not fits:
        raise _refused(f"{name} was made for {made_for}, and this job has {num_devices}")


def _refused(reason: str) -> PjrtError:
    return PjrtError(Code.INVALID_ARGUMENT, f"this program cannot be loaded: {reason}")
