"""A compiled program and the types of its arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
        native: objects that the engine attaches.
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

    def groups(self) -> frozenset[frozenset[int]]:
        """Return the groups of devices that meet in the program; see `polyxla_bridge.programs.hlo.groups`."""
        found = hlo.groups(self.optimized_hlo)
        if not self.devices:
            return found
        # A group without members stands for all that run the program.
        every = range(len(self.devices))
        return frozenset(frozenset(self.devices[one] for one in group or every) for group in found)

    def runs_on(self, index: int) -> bool:
        """Return whether a device runs the program."""
        return not self.devices or index in self.devices

    @functools.cached_property
    def parameters(self) -> list[ArrayType]:
        """Types of the arguments on one device."""
        return [ArrayType(dtype, dims) for dtype, dims in hlo.parameters(self.optimized_hlo)]

    def check(self, arguments: Sequence[ArrayType]) -> None:
        """Check the types of the arguments on one device.

        PJRT's own clients compare sizes in bytes only, and frameworks rely on it: TorchTPU passes an array of
        one number for a scalar. They would also take another part of an array, if it has the same size.

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
