"""Calls of the C library in partitioned programs. Importing this module imports jax.

XLA's partitioner knows how to divide an instruction, but not a call. Until it has run, `TARGET` is called. It
then asks what each device computes, and divides the batch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import jax
import numpy as np
from jaxlib import _jax, xla_client

from polyxla_bridge.engine.expansions import inlining
from polyxla_bridge.programs import hlo, rewrite
from polyxla_bridge.programs.hlo_pb2 import HloComputationProto as Computation
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module

TARGET = "polyxla_partitioned"
"""What XLA's partitioner replaces."""
_MANUAL = 4
"""The type of a sharding by which the program itself divides its arrays.
Source: OpSharding in xla/xla_data.proto."""
_REPLICATED = xla_client.HloSharding.replicate()


class Call(Protocol):
    """A call whose first operand has the batch in its first dimension.

    Attributes:
        is_divided: for each operand, whether it has, too.
        is_sum: whether the result is a sum over the batch; otherwise it has the batch in its first dimension.
    """

    @property
    def is_divided(self) -> Sequence[bool]: ...  # noqa: D102  (see above)

    @property
    def is_sum(self) -> bool: ...  # noqa: D102  (see above)

    def of_part(self, parts: int) -> Call:
        """Return the call for one of several parts of the batch, of which the last may be filled up."""

    @property
    def __call__(self) -> Callable[..., jax.Array]:
        """Call the library."""


_calls: dict[int, Call] = {}
_numbers = itertools.count()


def placeholder(call: Call, shape: tuple[int, ...], operands: Sequence[jax.Array]) -> jax.Array:
    """Return what stands for a call until the program is partitioned."""
    _register()
    number = next(_numbers)
    _calls[number] = call
    stands_for = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(shape, np.float32))  # type: ignore[no-untyped-call]
    result: jax.Array = stands_for(*operands, key=np.int64(number))
    return result


def can_divide(module: bytes) -> bool:
    """Return whether the partitioner asks: not in a program for Shardy, nor in one that divides itself."""
    types = {instruction.sharding.type for instruction in hlo.instructions(module)}
    return rewrite.SHARDY not in module and _MANUAL not in types


@cache
def _register() -> None:
    xla_client.register_custom_call_partitioner(TARGET, _of_user, _divide, _of_result, True)


def _call(config: bytes) -> Call:
    found = re.search(rb"key = (\d+)", config)
    assert found is not None
    return _calls[int(found[1])]


def _of_user(sharding: Any, shape: Any, config: bytes) -> Any:
    return sharding


def _of_result(shapes: Sequence[Any], shardings: Sequence[Any], result: Any, config: bytes) -> Any:
    """Return how the result is divided, from how the operands are."""
    call = _call(config)
    return _REPLICATED if call.is_sum else _of_batch(call, shapes, shardings)[0]


def _of_batch(call: Call, shapes: Sequence[Any], shardings: Sequence[Any]) -> tuple[Any, int]:
    """Return how a call's arrays divide the batch, and into how many parts; 1 if it stays whole."""
    has_batch = [*call.is_divided, not call.is_sum]
    # The result's sharding is not always known.
    for shape, sharding, may_divide in zip(shapes, shardings, has_batch, strict=False):
        if may_divide and sharding.is_tiled():
            sizes = shape.dimensions()
            parts, *others = sharding.tile_assignment_dimensions()[: len(sizes)]
            # A last part that is smaller has numbers of no meaning at its end, which must not be added.
            is_even = sizes[0] % parts == 0 or not call.is_sum
            if parts > 1 and is_even and set(others) == {1}:
                return sharding, parts
    return _REPLICATED, 1


def _divide(
    shapes: Sequence[Any], shardings: Sequence[Any], result_shape: Any, result_sharding: Any, config: bytes
) -> tuple[bytes, list[Any], Any]:
    """Return what a device computes, and how operands and result are divided."""
    call = _call(config)
    of_batch, parts = _of_batch(call, [*shapes, result_shape], [*shardings, result_sharding])
    given = [of_batch if has_batch else _REPLICATED for has_batch in call.is_divided]
    local = [
        ("float32", tuple(sharding.tile(shape).dimensions()))
        for shape, sharding in zip(shapes, given, strict=True)
    ]
    module = inlining.lowered(call.of_part(parts), local)
    if call.is_sum and parts > 1:
        devices = np.array(of_batch.tile_assignment_devices()).reshape(parts, -1)
        _add_all_reduce(module, devices.T.tolist())
    stablehlo: bytes = _jax.mlir.hlo_to_stablehlo(module.SerializeToString())
    return stablehlo, given, _REPLICATED if call.is_sum else of_batch


def _add_all_reduce(module: Module, groups: list[list[int]]) -> None:
    """Add up the results of a program over groups of devices."""
    entry = hlo.entry_of(module)
    every = [instruction for computation in module.computations for instruction in computation.instructions]
    (shape,) = (instruction.shape for instruction in entry.instructions if instruction.id == entry.root_id)
    number = itertools.count(max(instruction.id for instruction in every) + 1)
    adding = Computation(name="add", id=max(computation.id for computation in module.computations) + 1)
    adding.program_shape.result.element_type = hlo.F32
    for index, name in enumerate(("left", "right")):
        parameter = adding.instructions.add(
            name=name, opcode="parameter", parameter_number=index, id=next(number)
        )
        parameter.shape.element_type = hlo.F32
        adding.program_shape.parameters.append(parameter.shape)
        adding.program_shape.parameter_names.append(name)
    added = adding.instructions.add(name="sum", opcode="add", id=next(number))
    added.operand_ids[:] = [parameter.id for parameter in adding.instructions[:2]]
    added.shape.element_type = hlo.F32
    adding.root_id = added.id
    reduced = entry.instructions.add(name="of_all", opcode="all-reduce", shape=shape, id=next(number))
    reduced.operand_ids[:], reduced.called_computation_ids[:] = [entry.root_id], [adding.id]
    # The partitioner gives it a channel of its own.
    reduced.channel_id, reduced.use_global_device_ids = 1, True
    for group in groups:
        reduced.replica_groups.add(replica_ids=group)
    entry.root_id = reduced.id
    before = list(module.computations)
    del module.computations[:]
    module.computations.extend([adding, *before])
