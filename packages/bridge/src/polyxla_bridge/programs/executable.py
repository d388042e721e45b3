"""A compiled program and the types of its arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of an array.

    Attributes:
        dtype: name in numpy or ml_dtypes, one of `polyxla_bridge.abi.DTYPES`.
        dims: size of each dimension; empty for a scalar.
    """

    dtype: str
    dims: tuple[int, ...]


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
        device: index of the only device that runs it; None if all of the job's do.
        native: objects that the engine attaches.
    """

    name: str
    outputs: tuple[ArrayType, ...]
    num_replicas: int
    optimized_hlo: bytes
    code_size_bytes: int
    fingerprint: str
    num_partitions: int = 1
    device: int | None = None
    native: dict[str, Any] = field(default_factory=dict)
