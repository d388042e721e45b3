"""Questions about a program in HLO: its arguments, results, donated parameters and collectives."""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from polyxla_bridge.abi import Code, width
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.hlo_pb2 import (
    DeviceAssignmentProto,
    HloComputationProto,
    HloInstructionProto,
    HloModuleProto,
    HloModuleProtoWithConfig,
    IotaReplicaGroupListProto,
    MeshAxesReplicaGroupListProto,
    OpMetadata,
    ShapeProto,
)

# dtypes by element type. Source: PrimitiveType in xla_data.proto.
_PRIMITIVES = {
    1: "bool",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "uint8",
    7: "uint16",
    8: "uint32",
    9: "uint64",
    10: "float16",
    11: "float32",
    12: "float64",
    15: "complex64",
    16: "bfloat16",
    17: "token",
    18: "complex128",
    19: "float8_e5m2",
    20: "float8_e4m3fn",
    21: "int4",
    22: "uint4",
    23: "float8_e4m3b11fnuz",
    24: "float8_e5m2fnuz",
    25: "float8_e4m3fnuz",
    26: "int2",
    27: "uint2",
    28: "float8_e4m3",
    29: "float8_e3m4",
    32: "float4_e2m1fn",
    33: "float8_e8m0fnu",
}

PRED, F32, TUPLE = 1, 11, 13
"""Element types of booleans, of float32 and of tuples. Source: as above."""

NARROW = frozenset(("bfloat16", "float16"))
"""Floating-point dtypes that PyTorch adds, and normalises, in float32."""
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
"""Instructions that wait for other replicas. Source: HloOpcode in xla/hlo/ir/hlo_opcode.h."""
Meet = tuple[str, tuple[tuple[int, ...], ...]]
"""A collective: its description, and the groups that meet in it; see `meets`."""
SHARED_TARGETS = {kind: f"polyxla_{kind}" for kind in _COLLECTIVES if kind != "ragged-all-to-all"}
"""The call of the C library that replaces each collective; see `shared_collectives`. Its name contains the
collective's, so that a search in an optimised program finds it."""
_SHARED_KINDS = {target: kind for kind, target in SHARED_TARGETS.items()}
_ONE_WAY = ("collective-broadcast", "collective-permute")
"""Collectives in which a replica may be done before the others have begun."""


def parse_module(data: bytes) -> HloModuleProto:
    """Parse a serialised HloModuleProto; fields that hlo.proto does not declare survive."""
    module = HloModuleProto()
    module.ParseFromString(data)
    return module


def entry_of(module: HloModuleProto) -> HloComputationProto:
    """Return the computation that a module begins with."""
    (entry,) = (
        computation for computation in module.computations if computation.id == module.entry_computation_id
    )
    return entry


def module_name(hlo: bytes) -> str:
    """Return the name of a serialised HloModuleProto."""
    return parse_module(hlo).name


def results(hlo: bytes) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and dimensions of each result of a serialised HloModuleProto.

    Raises:
        PjrtError: an argument or result has a dynamic shape.
    """
    module = parse_module(hlo)
    arrays = _flat([module.host_program_shape.result])
    for array in (*arrays, *module.host_program_shape.parameters):
        if any(array.is_dynamic_dimension):
            raise PjrtError(
                Code.UNIMPLEMENTED,
                f"{module.name} has an array whose size {tuple(array.dimensions)} is only an upper bound: "
                "dynamic shapes are not supported; give the array a fixed shape, by padding or with a mask",
            )
    return [array_type(array) for array in arrays]


def parameters(hlo: bytes) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and dimensions of each argument that a serialised HloModuleProto takes."""
    arrays = _flat(parse_module(hlo).host_program_shape.parameters)
    return [array_type(array) for array in arrays]


def array_type(shape: ShapeProto) -> tuple[str, tuple[int, ...]]:
    """Return dtype and dimensions of an array."""
    return _PRIMITIVES[shape.element_type], tuple(shape.dimensions)


def holder(dtype: str, dims: Sequence[int]) -> bytes:
    """Return a serialised HloModuleProto of a program that takes an array, and does nothing with it."""
    module = HloModuleProto(name="holder", entry_computation_id=1)
    computation = module.computations.add(name="main", id=1, root_id=2)
    held = computation.instructions.add(name="held", opcode="parameter", parameter_number=0, id=1)
    held.shape.element_type = next(number for number, name in _PRIMITIVES.items() if name == dtype)
    held.shape.dimensions.extend(dims)
    held.shape.is_dynamic_dimension.extend([False] * len(dims))
    nothing = computation.instructions.add(name="nothing", opcode="tuple", id=2)
    nothing.shape.element_type = TUPLE
    computation.program_shape.parameters.append(held.shape)
    computation.program_shape.parameter_names.append(held.name)
    computation.program_shape.result.CopyFrom(nothing.shape)
    module.host_program_shape.CopyFrom(computation.program_shape)
    return module.SerializeToString()


def with_layouts(hlo: bytes) -> bytes:
    """Return a serialised HloModuleProto in which every array has a layout: row-major, if it had none.

    XLA ends the process if a program has layouts for some of its arrays only.
    """
    module = parse_module(hlo)
    for shape in _flat(instruction.shape for instruction in _of(module)):
        if not shape.HasField("layout"):
            # A scalar's layout is empty, and must be marked as present.
            shape.layout.SetInParent()
            shape.layout.minor_to_major[:] = range(len(shape.dimensions) - 1, -1, -1)
    return module.SerializeToString()


def _flat(shapes: Iterable[ShapeProto]) -> list[ShapeProto]:
    """Return the arrays of shapes. Tuples are one level deep: torch_xla does not nest them."""
    return [
        array
        for shape in shapes
        for array in (shape.tuple_shapes if shape.element_type not in _PRIMITIVES else [shape])
    ]


def size_bytes(shape: ShapeProto) -> int:
    """Return the size of an array of this shape; 0 if the shape is not an array's."""
    dtype = _PRIMITIVES.get(shape.element_type, "token")
    return math.prod(shape.dimensions) * width(dtype)


def assigned_devices(assignment: bytes) -> tuple[int, ...]:
    """Return the devices of a serialised DeviceAssignmentProto, by partition."""
    parsed = DeviceAssignmentProto()
    parsed.ParseFromString(assignment)
    return tuple(
        number for partition in parsed.computation_devices for number in partition.replica_device_ids
    )


def is_same_array(first: ShapeProto, other: ShapeProto) -> bool:
    """Return whether both are arrays of the same dtype and dimensions."""
    arrays = ((shape.element_type, *shape.dimensions) for shape in (first, other))
    return first.element_type in _PRIMITIVES and len(set(arrays)) == 1


def total_bytes(hlo: bytes) -> int:
    """Return the total size of the results of all instructions in a serialised HloModuleProto."""
    return sum(size_bytes(instruction.shape) for instruction in instructions(hlo))


def structure(hlo: bytes) -> bytes:
    """Return a digest of the opcodes, shapes and operands in a serialised HloModuleProto.

    Programs of replicas that differ in their numbers only, such as the place of their share, have the same.
    """
    digest = hashlib.sha256()
    for instruction in instructions(hlo):
        digest.update(
            repr(
                (instruction.opcode, instruction.operand_ids[:], instruction.called_computation_ids[:])
            ).encode()
        )
        digest.update(instruction.shape.SerializePartialToString(deterministic=True))
    return digest.digest()


def stacks(hlo: bytes) -> dict[str, list[tuple[str, int]]]:
    """Return the Python stack that made each instruction of a serialised HloModuleProto.

    The innermost frame comes first. Frames are files and lines. Instructions without one are left out; all
    are, unless torch_xla had ``XLA_HLO_DEBUG`` and ``XLA_IR_DEBUG``.
    """
    index = parse_module(hlo).stack_frame_index

    def frames(number: int) -> Iterator[tuple[str, int]]:
        # The numbers count from 1, and 0 stands for no frame.
        while number:
            frame = index.stack_frames[number - 1]
            place = index.file_locations[frame.file_location_id - 1]
            yield index.file_names[place.file_name_id - 1], place.line
            number = frame.parent_frame_id

    found = {
        instruction.name: OpMetadata.FromString(instruction.metadata).stack_frame_id
        for instruction in instructions(hlo)
    }
    return {name: list(frames(number)) for name, number in found.items() if number}


def donated(hlo: bytes) -> frozenset[int]:
    """Return the indices of the parameters whose memory a program takes, for its results or otherwise."""
    module = parse_module(hlo)
    taken: list[Any] = [*module.input_output_alias.entries, *module.buffer_donor.entries]
    # torch_xla packs many parameters into a tuple, whose elements an index names.
    return frozenset((*entry.parameter_shape_index, entry.parameter_number)[0] for entry in taken)


def collectives(hlo: bytes) -> tuple[str, ...]:
    """Return the kinds of collectives in a serialised HloModuleProto, each once."""
    found = {_kind(instruction) for instruction in instructions(hlo)}
    return tuple(kind for kind in _COLLECTIVES if kind in found)


def is_collective(instruction: HloInstructionProto) -> bool:
    """Return whether an instruction waits for other replicas."""
    return _kind(instruction) in _COLLECTIVES


def computations_with(module: HloModuleProto, has: Callable[[HloInstructionProto], bool]) -> set[int]:
    """Return the computations that have an instruction of a kind, or call one that has.

    Args:
        module: their module.
        has: returns whether an instruction is of that kind.
    """
    found: set[int] = set()
    # A module lists each computation after those that it calls.
    for computation in module.computations:
        if any(
            has(instruction) or not found.isdisjoint(instruction.called_computation_ids)
            for instruction in computation.instructions
        ):
            found.add(computation.id)
    return found


def depends_on_replicas(hlo: bytes) -> bool:
    """Return whether a program's results depend on the replica that runs it, or on other replicas."""
    found = {_kind(instruction) for instruction in instructions(hlo)}
    return bool(found & {*_COLLECTIVES, "replica-id", "partition-id", "send", "recv"})


def listed_groups(instruction: HloInstructionProto) -> list[list[int]]:
    """Return the groups of a collective; none if all replicas meet."""
    given = instruction.collective_device_list
    if listed := given.replica_groups or instruction.replica_groups:
        return [list(group.replica_ids) for group in listed]
    if instruction.HasField("mesh_axes_replica_group_list"):
        return _along_axes(instruction.mesh_axes_replica_group_list)
    if given.HasField("iota_replica_group_list"):
        return _by_formula(given.iota_replica_group_list)
    if instruction.HasField("iota_collective_device_list"):
        return _by_formula(instruction.iota_collective_device_list)
    return []


def _by_formula(given: IotaReplicaGroupListProto) -> list[list[int]]:
    sizes = given.iota_reshape_dims
    return _cut(
        _transposed(range(math.prod(sizes)), sizes, given.iota_transpose_perm), given.num_devices_per_group
    )


def _along_axes(given: MeshAxesReplicaGroupListProto) -> list[list[int]]:
    axes = given.mesh.axes
    # Each part of an axis that is named: the axis, and the products of the sizes before and up to it.
    parts = [
        (
            axis.mesh_axis_index,
            axis.sub_axis.pre_size or 1,
            (axis.sub_axis.pre_size * axis.sub_axis.size) or axes[axis.mesh_axis_index].size,
        )
        for axis in given.axes
    ]
    sizes: list[int] = []
    dimensions: dict[tuple[int, int], int] = {}
    for index, axis in enumerate(axes):
        ends = {1, axis.size, *(end for of, *both in parts if of == index for end in both)}
        for start, end in itertools.pairwise(sorted(ends)):
            dimensions[index, start] = len(sizes)
            sizes.append(end // start)
    devices: Sequence[int] = given.mesh.device_ids or range(math.prod(sizes))
    if given.mesh.HasField("iota"):
        devices = _transposed(devices, given.mesh.iota.reshape_dims, given.mesh.iota.transpose_perm)
    within = [dimensions[index, start] for index, start, end in parts if start < end]
    outside = [dimension for dimension in range(len(sizes)) if dimension not in within]
    members = math.prod(sizes[dimension] for dimension in within)
    return _cut(_transposed(devices, sizes, [*outside, *within]), members)


def _transposed(numbers: Sequence[int], sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the numbers of an array in the order of its transpose."""
    steps = [math.prod(sizes[dimension + 1 :]) for dimension in order]
    places = itertools.product(*(range(sizes[dimension]) for dimension in order))
    return [numbers[sum(map(operator.mul, place, steps))] for place in places]


def _cut(numbers: list[int], length: int) -> list[list[int]]:
    return [numbers[start : start + length] for start in range(0, len(numbers), length)]


def reduction(computation: HloComputationProto) -> str:
    """Return the opcode by which a computation combines its two parameters; empty if it does more or less."""
    if len(computation.instructions) != 3:
        return ""
    parameters = {each.id for each in computation.instructions if each.opcode == "parameter"}
    (root,) = (each for each in computation.instructions if each.id == computation.root_id)
    return root.opcode if len(parameters) == 2 and {*root.operand_ids} == parameters else ""


def reductions(module: HloModuleProto) -> dict[int, str]:
    """Return the `reduction` of each computation, by its id."""
    return {computation.id: reduction(computation) for computation in module.computations}


def groups(hlo: bytes) -> frozenset[frozenset[int]]:
    """Return the groups of replicas that meet in a program: each waits until all of its group have come.

    A group without members stands for all replicas. Collectives in which a replica may be done before others
    have begun are left out.
    """
    found: set[frozenset[int]] = set()
    for instruction in instructions(hlo):
        if _kind(instruction) not in _COLLECTIVES or _kind(instruction) in _ONE_WAY:
            continue
        if instruction.custom_call_target in _SHARED_KINDS:
            found.update(_shared_groups(instruction))
            continue
        found.update(map(frozenset, listed_groups(instruction) or [[]]))
    return frozenset(found)


def called_targets(hlo: bytes) -> frozenset[str]:
    """Return the functions of other libraries that a program calls."""
    targets = frozenset(instruction.custom_call_target for instruction in instructions(hlo))
    return targets - {""}


def shares_memory(hlo: bytes) -> bool:
    """Return whether a program has a collective that goes through memory that the replicas share."""
    return not called_targets(hlo).isdisjoint(_SHARED_KINDS)


def groups_on_sockets(hlo: bytes) -> frozenset[frozenset[int]]:
    """Return the groups of the collectives that do not go through shared memory.

    A group without members stands for all replicas.
    """
    found: set[frozenset[int]] = set()
    for instruction in instructions(hlo):
        if instruction.opcode.removesuffix("-start") in _COLLECTIVES:
            found.update(map(frozenset, listed_groups(instruction) or [[]]))
    return frozenset(found)


def _shared_groups(instruction: HloInstructionProto) -> set[frozenset[int]]:
    config = instruction.backend_config.decode()
    members, size = (
        re.search(r"groups = array<i64: ([^>]*)>", config),
        re.search(r"group_size = (\d+)", config),
    )
    assert members is not None
    assert size is not None
    numbers, count = [int(number) for number in members[1].split(",")], int(size[1])
    return {frozenset(numbers[first : first + count]) for first in range(0, len(numbers), count)}


def meets(hlo: bytes) -> tuple[Meet, ...]:
    """Return what replicas do together in a serialised HloModuleProto, in the program's order.

    Each collective has a description, such as ``all-reduce (maximum) of float32[2,3]``, and its groups of
    replicas: no groups if all replicas meet.
    """
    module = parse_module(hlo)
    names = reductions(module)
    shapes = {instruction.id: instruction.shape for instruction in _of(module)}
    found: list[Meet] = []
    for instruction in _of(module):
        if not is_collective(instruction):
            continue
        reducing = [names[number] or "custom" for number in instruction.called_computation_ids[:1]]
        along = (
            [f"along dimension {','.join(map(str, instruction.dimensions))}"]
            if instruction.dimensions
            else []
        )
        arrays = [_named(shapes[number]) for number in instruction.operand_ids]
        if len(arrays) > 1 and arrays[-1] == "float32[]":
            # The last operand is torch_xla's token, which orders its collectives.
            arrays.pop()
        words = [_kind(instruction), *(f"({name})" for name in reducing), f"of {', '.join(arrays)}", *along]
        found.append((" ".join(words), tuple(map(tuple, listed_groups(instruction)))))
    return tuple(found)


def _named(shape: ShapeProto) -> str:
    if shape.tuple_shapes:
        return ", ".join(map(_named, shape.tuple_shapes))
    return f"{_PRIMITIVES.get(shape.element_type, 'token')}[{','.join(map(str, shape.dimensions))}]"


def instructions(hlo: bytes) -> Iterator[HloInstructionProto]:
    """Yield all instructions of a serialised HloModuleProto."""
    return _of(parse_module(hlo))


def unused_ids(module: HloModuleProto) -> Iterator[int]:
    """Yield ids that no instruction of a module has.

    The upper half of an id may be that of its computation. XLA reads only the lower half, and refuses a
    computation in which two instructions have the same.
    """
    return itertools.count(1 + max((each.id % 2**32 for each in _of(module)), default=0))


def unused_computation_ids(module: HloModuleProto) -> Iterator[int]:
    """Yield ids that no computation of a module has."""
    return itertools.count(1 + max(computation.id for computation in module.computations))


def add_called(module: HloModuleProto, called: Iterable[HloComputationProto]) -> None:
    """Add computations that those of a module call; the entry stays the last."""
    before = list(module.computations)
    del module.computations[:]
    module.computations.extend([*called, *before])


def _of(module: HloModuleProto) -> Iterator[HloInstructionProto]:
    for computation in module.computations:
        yield from computation.instructions


def _kind(instruction: HloInstructionProto) -> str:
    # An asynchronous collective is two instructions. Its start counts as the collective, its end does not.
    return _SHARED_KINDS.get(instruction.custom_call_target) or instruction.opcode.removesuffix("-start")


def with_config(hlo: bytes) -> bytes:
    """Return a serialised HloModuleProtoWithConfig whose entry layout is the program's own shape.

    torch_xla reads the layouts of results from the config, and ends the process if there is none.
    """
    whole = HloModuleProtoWithConfig()
    whole.hlo_module.MergeFromString(hlo)
    whole.config.entry_computation_layout.CopyFrom(whole.hlo_module.host_program_shape)
    return whole.SerializeToString()
