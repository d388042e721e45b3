"""Rewriting of programs that jaxlib cannot convert, or that its CPU client runs slowly."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import HloModuleProto as Module
from polyxla_bridge.programs.hlo_pb2 import ShapeProto as Shape

PACKED_BYTES = 1 << 20
"""Largest operand of an all-reduce that is packed with others, in bytes. The client reduces one operand after
the other, and each costs several messages in both directions: 1.3 ms with 4 processes on 2 cores, in which
4 MiB can be copied twice."""

BITWISE = ("and", "or", "xor")
"""Reductions that jaxlib's CPU client does not support; of booleans it supports the first two."""

_ARRAYS = {"dynamic-slice": 1, "dynamic-update-slice": 2}
"""How many operands of a dynamic slice come before its indices."""

CPU_OPTIONS: Mapping[str, bool] = {
    "xla_cpu_enable_fast_math": False,
    "xla_cpu_enable_fast_min_max": False,
    "xla_enable_fast_math": False,
}
"""Options by which XLA's CPU compiler computes the numbers that torch computes: with its defaults, which
torch_xla's own client has and TorchTPU sends, ``max`` and ``min`` lose NaN. They replace the framework's
options, and a flag in ``XLA_FLAGS`` replaces them.
Source: DebugOptions in xla/xla.proto.
"""
FUSION_OPTION = "xla_cpu_experimental_ynn_fusion_type"
"""An option of XLA's newer CPU compilers, which is set to nothing: with YNNPACK's kernels, a step of a small
convnet took 1.2 times as long on 2 cores (jaxlib 0.10.2, ``nox -s bench -- replicas step``).
"""

_MESHES, _SHARDY_SHARDING = "xla.sdy.meshes", "xla.sdy.sharding"
"""Attributes of a program that is written for Shardy, XLA's newer partitioner, and of its instructions.
Source: ``kMeshesRoundTripAttr`` and ``kShardingRoundTripAttr`` in xla/service/spmd/shardy/constants.h."""
SHARDY = _MESHES.encode()
"""Part of such a program."""
_TO_MANUAL, _MANUAL_IN_SHARDY = "SPMDFullToShardShape", b"xla.sdy.manual_computation"
"""Where a program begins to divide its arrays itself: the target of a call, and part of a name if it is for
Shardy. Source: xla/service/spmd/spmd_partitioner.cc; xla/service/spmd/shardy/constants.h."""
_WITH_EDGES = ("pad", "reduce-window", "select-and-scatter")
"""Instructions that add elements at the edges of an array."""
_WHOLE, _TILED, _MANUAL = 0, 3, 4
"""Types of shardings. Source: Type of OpSharding in xla/xla_data.proto."""

_STRICT = {"GE": "GT", "LE": "LT"}
"""Comparisons that hold for equal numbers, and the strict ones that order unequal numbers in the same way."""

Rewrite = Callable[["Replacement"], None]
"""Adds the instructions that replace another. The last gets the original's id: its users need no change."""


def for_jaxlib(module: bytes, replicas: int, partitions: int = 1) -> bytes:
    """Rewrite a serialised HloModuleProto for jaxlib's CPU client.

    - A dynamic slice, or the update of one, that takes its indices in one vector (``randperm`` of torch_xla)
      takes a number for each dimension, because StableHLO knows no other form.

    - A sort by "greater or equal" or "less or equal", as in TorchTPU's ``unique``, sorts by "greater" or
      "less": the client sorts by C++'s ``std::sort``, which reads beyond the array where equal elements come
      before each other.

    - An all-reduce of integers by "and", "or" or "xor", or of booleans by "xor", which the client refuses,
      becomes an all-gather whose rows are combined locally. A partitioned program has one too, if it is
      written for its devices, as TorchTPU's are.

    Only in a partitioned program:

    - What a called computation returns loses its sharding, if JAX has written the program for Shardy: XLA
      would take the program for one of the older partitioner, and then refuse it.
    - For the gradient of a convolution's kernel, the batch is divided among all devices, or nothing is. Where
      two devices have the same images, or the same parts of them, XLA's partitioner (jaxlib 0.10.2) adds the
      gradients of both, and returns twice the gradient.
    - For the gradient of max-pooling with windows that overlap, the first dimension is divided, or nothing
      is. Divided in another one, it was wrong.
    - What adds elements at the edges of an array (a pad, a pooling) gets a copy of its own. The partitioner
      keeps what it has added, and takes it for the next such instruction, too: of two pads of one array, with
      zeros and with ones, both had zeros.

    Only in others, because the partitioner adds collectives in forms that the client knows:

    - A reduce-scatter of several operands (``xm.reduce_scatter`` of a list) becomes one for each operand,
      because StableHLO's has a single one. Each gets a channel of its own: the runtime would otherwise
      confuse them.
    - An all-to-all of a single part, which moves nothing, becomes that part: jaxlib 0.10.2 ends the process
      over it.
    - An all-reduce of several operands packs the small ones of each dtype into one operand.
    - A convolution that reads its kernel backwards (the gradient of TorchTPU's convolutions) gets a reversed
      kernel: the client has no fast code for the first.

    Args:
        module: the program.
        replicas: number of replicas in the job.
        partitions: number of devices that compute a replica together.

    Returns:
        The rewritten program; `module` itself if nothing had to change.
    """
    parsed = hlo.parse_module(module)
    if partitions > 1 and SHARDY in module and _has_freed_results(parsed):
        module = parsed.SerializeToString()
    every = [instruction for computation in parsed.computations for instruction in computation.instructions]
    shapes = {instruction.id: instruction.shape for instruction in every}
    orders = {
        number
        for instruction in every
        if instruction.opcode == "sort"
        for number in instruction.called_computation_ids
    }
    comparisons = frozenset(
        computation.root_id for computation in parsed.computations if computation.id in orders
    )
    division = _Division.of(module, parsed, partitions)
    rules = _Rules(replicas, partitions, hlo.reductions(parsed), shapes, comparisons, division)
    return rewritten(module, parsed, rules.rewrite_of)


def has_shardings(module: bytes, parsed: Module) -> bool:
    """Return whether a program says how arrays are divided. Otherwise it is that of each device.

    Args:
        module: a serialised HloModuleProto.
        parsed: the same.
    """
    every = [instruction for computation in parsed.computations for instruction in computation.instructions]
    return SHARDY in module or any(instruction.HasField("sharding") for instruction in every)


def _has_freed_results(parsed: Module) -> bool:
    """Remove the shardings of what called computations return; return whether there were any."""
    roots = [
        instruction
        for computation in parsed.computations
        for instruction in computation.instructions
        if instruction.id == computation.root_id
        and computation.id != parsed.entry_computation_id
        and instruction.HasField("sharding")
    ]
    for root in roots:
        # Shardy reads its own attribute of the instruction.
        root.ClearField("sharding")
    return bool(roots)


def rewritten(module: bytes, parsed: Module, rewrite_of: Callable[[Instruction], Rewrite | None]) -> bytes:
    """Rewrite the instructions of a module.

    Args:
        module: a serialised HloModuleProto.
        parsed: the same.
        rewrite_of: returns the rewrite of an instruction; None if it stays.

    Returns:
        The rewritten program; `module` itself if every instruction stays.
    """
    every = [instruction for computation in parsed.computations for instruction in computation.instructions]
    if not any(map(rewrite_of, every)):
        return module
    shapes = {instruction.id: instruction.shape for instruction in every}
    numbers = _FreshNumbers(parsed)
    for computation in parsed.computations:
        instructions = list(computation.instructions)
        del computation.instructions[:]
        for instruction in instructions:
            rewrite = rewrite_of(instruction)
            computation.instructions.extend(
                _replacing(instruction, rewrite, numbers, shapes) if rewrite else [instruction]
            )
    return parsed.SerializeToString()


def _replacing(
    instruction: Instruction, rewrite: Rewrite, numbers: _FreshNumbers, shapes: Mapping[int, Shape]
) -> list[Instruction]:
    replacement = Replacement(instruction, numbers, shapes)
    rewrite(replacement)
    return replacement.instructions


@dataclass(frozen=True)
class _Rules:
    """Chooses how an instruction is rewritten, by what the instruction alone does not say.

    Attributes:
        replicas: number of replicas in the job.
        partitions: number of devices that compute a replica together.
        reductions: how each computation combines two numbers, by its id.
        shapes: shape of each instruction, by id.
        comparisons: ids of the instructions that decide the order of a sort.
        division: of arrays among all devices; None if nobody divides arrays, or the program itself does.
    """

    replicas: int
    partitions: int
    reductions: Mapping[int, str]
    shapes: Mapping[int, Shape]
    comparisons: frozenset[int]
    division: _Division | None

    def rewrite_of(self, instruction: Instruction) -> Rewrite | None:
        """Return the rewrite of an instruction; None if it stays."""
        if self._takes_a_vector(instruction):
            return _separate_indices
        if instruction.id in self.comparisons and instruction.comparison_direction in _STRICT:
            return _compare_strictly
        # This comes before the packing of operands, which is for reductions that the client supports.
        if instruction.opcode == "all-reduce" and (combine := self._bitwise(instruction)):
            return partial(_gather_and_combine, combine, self._group_size(instruction))
        if self.partitions > 1:
            return self._rewrite_for_partitioner(instruction)
        return self._rewrite_for_replicas(instruction)

    def _rewrite_for_partitioner(self, instruction: Instruction) -> Rewrite | None:
        if self.division and instruction.opcode == "convolution" and _sums_batch(instruction):
            return partial(_divide_batch, self.division)
        if self.division and instruction.opcode == "select-and-scatter" and _overlaps(instruction):
            return partial(_divide_pooling, self.division)
        return _copy_operands if instruction.opcode in _WITH_EDGES else None

    def _takes_a_vector(self, instruction: Instruction) -> bool:
        # Only a dynamic slice has operands behind its arrays. Indices that are separate already are scalars.
        has_indices = len(instruction.operand_ids) > _ARRAYS.get(
            instruction.opcode, len(instruction.operand_ids)
        )
        return has_indices and len(self.shapes[instruction.operand_ids[-1]].dimensions) > 0

    def _rewrite_for_replicas(self, instruction: Instruction) -> Rewrite | None:
        if instruction.opcode == "reduce-scatter" and len(instruction.operand_ids) > 1:
            return _scatter_one_by_one
        if instruction.opcode == "all-to-all" and len(instruction.shape.tuple_shapes) == 1:
            return _skip_exchange
        if instruction.opcode == "convolution" and _reversed(instruction):
            return _reverse_kernel
        if instruction.opcode != "all-reduce":
            return None
        return _pack_operands if len(_groups(instruction)) < len(instruction.operand_ids) else None

    def _bitwise(self, instruction: Instruction) -> str | None:
        """Return the operator of an all-reduce that the client refuses; None if it knows it."""
        combine = self.reductions[instruction.called_computation_ids[0]]
        is_known = combine in ("and", "or") and result_shapes(instruction)[0].element_type == hlo.PRED
        return combine if combine in BITWISE and not is_known else None

    def _group_size(self, instruction: Instruction) -> int:
        groups = hlo.listed_groups(instruction)
        return len(groups[0]) if groups else self.replicas


@dataclass(frozen=True)
class _Division:
    """How an array is divided among all devices of a partitioned program.

    Attributes:
        devices: number of devices.
        mesh: name of Shardy's mesh of all devices; empty in a program of the older partitioner.
        axes: of that mesh, in Shardy's form.
    """

    devices: int
    mesh: str = ""
    axes: str = ""

    @classmethod
    def of(cls, module: bytes, parsed: Module, partitions: int) -> _Division | None:
        """Return that of a program; None if nobody divides arrays, or the program itself does."""
        if partitions == 1 or _MANUAL_IN_SHARDY in module or not has_shardings(module, parsed):
            return None
        if any(
            instruction.sharding.type == _MANUAL or instruction.custom_call_target == _TO_MANUAL
            for computation in parsed.computations
            for instruction in computation.instructions
        ):
            return None
        if SHARDY not in module:
            return cls(partitions)
        # For example {mesh = #sdy.mesh<["data"=2, "model"=4]>}.
        for name, axes in re.findall(
            r"(\w+) = #sdy.mesh<\[([^]]*)\]", parsed.frontend_attributes.map[_MESHES]
        ):
            sizes = re.findall(r'("[^"]+")=(\d+)', axes)
            if math.prod(int(size) for _, size in sizes) == partitions:
                return cls(partitions, name, ", ".join(axis for axis, _ in sizes))
        return None

    def add(self, replacement: Replacement, array: int, shape: Shape, dimension: int) -> int:
        """Divide an array in a dimension, or keep it whole if that has no equal parts; return the id."""
        divided = replacement.add("custom-call", shape, [array])
        divided.custom_call_target = "Sharding"
        parts, axes = [1] * len(shape.dimensions), ["{}"] * len(shape.dimensions)
        if shape.dimensions[dimension] % self.devices == 0:
            parts[dimension], axes[dimension] = self.devices, f"{{{self.axes}}}"
            divided.sharding.type = _TILED
            divided.sharding.tile_assignment_dimensions[:] = parts
            divided.sharding.tile_assignment_devices[:] = range(self.devices)
        else:
            divided.sharding.type = _WHOLE
        if self.mesh:
            value = f"#sdy.sharding_per_value<[<@{self.mesh}, [{', '.join(axes)}]>]>"
            divided.frontend_attributes.map[_SHARDY_SHARDING] = value
        return divided.id


class _FreshNumbers:
    """Ids and channels that no instruction of the module has."""

    def __init__(self, module: Module) -> None:
        channels = (
            each.channel_id for computation in module.computations for each in computation.instructions
        )
        self.channels = itertools.count(max(channels) + 1)
        self.ids = hlo.unused_ids(module)


class Replacement:
    """The instructions that replace another, in the order of execution.

    Args:
        original: the instruction to replace.
        numbers: unused ids and channels.
        shapes: shape of each instruction of the module, by id.

    Attributes:
        original: the instruction to replace.
        instructions: what was added so far.
    """

    def __init__(self, original: Instruction, numbers: _FreshNumbers, shapes: Mapping[int, Shape]) -> None:
        self.original = original
        self.instructions: list[Instruction] = []
        self._numbers = numbers
        self._shapes = shapes

    def shape_of(self, operand: int) -> Shape:
        """Return the shape of an operand."""
        return self._shapes[operand]

    def add(self, opcode: str, shape: Shape, operands: Sequence[int]) -> Instruction:
        """Add a new instruction."""
        made = Instruction(opcode=opcode, metadata=self.original.metadata)
        return self._append(made, opcode, shape, operands)

    def add_copy(self, suffix: str, shape: Shape, operands: Sequence[int]) -> Instruction:
        """Add a copy of the original with another shape and other operands."""
        made = Instruction()
        made.CopyFrom(self.original)
        return self._append(made, suffix, shape, operands)

    def add_slice(self, shape: Shape, operand: int, *ranges: tuple[int, int]) -> Instruction:
        """Add a slice; each range is the start and the limit of one dimension."""
        made = self.add("slice", shape, [operand])
        for start, limit in ranges:
            made.slice_dimensions.add(start=start, limit=limit, stride=1)
        return made

    def add_tuple(self, operands: Sequence[int]) -> None:
        """Add a tuple that takes the place of the original."""
        original = self.original
        made = Instruction(name=original.name, opcode="tuple", id=original.id, metadata=original.metadata)
        made.shape.CopyFrom(original.shape)
        made.operand_ids[:] = operands
        self.instructions.append(made)

    def use_new_channel(self, instruction: Instruction) -> None:
        """Give an instruction a channel of its own."""
        instruction.channel_id = next(self._numbers.channels)

    def _append(self, made: Instruction, suffix: str, shape: Shape, operands: Sequence[int]) -> Instruction:
        lower = next(self._numbers.ids)
        # The upper half, which may be the computation's, stays.
        made.id = self.original.id // 2**32 * 2**32 + lower
        made.name = f"{self.original.name}.{suffix}.{lower}"
        made.shape.CopyFrom(shape)
        made.operand_ids[:] = operands
        self.instructions.append(made)
        return made


def _separate_indices(replacement: Replacement) -> None:
    original = replacement.original
    *arrays, vector = original.operand_ids
    shape = replacement.shape_of(vector)
    number, one = Shape(element_type=shape.element_type), _array(shape, 1)
    parts = [replacement.add_slice(one, vector, (i, i + 1)) for i in range(shape.dimensions[0])]
    indices = [replacement.add("reshape", number, [part.id]).id for part in parts]
    separate = replacement.add_copy("indices", original.shape, [*arrays, *indices])
    # The original's users need no change.
    separate.id = original.id


def _scatter_one_by_one(replacement: Replacement) -> None:
    original = replacement.original
    parts = zip(original.shape.tuple_shapes, original.operand_ids, strict=True)
    singles = [replacement.add_copy("part", shape, [operand]) for shape, operand in parts]
    for single in singles if original.channel_id else ():
        replacement.use_new_channel(single)
    replacement.add_tuple([single.id for single in singles])


def _skip_exchange(replacement: Replacement) -> None:
    replacement.add_tuple(replacement.original.operand_ids)


def _reversed(instruction: Instruction) -> list[int]:
    """Return the dimensions of a convolution's kernel that are read backwards."""
    spatial = instruction.convolution_dimension_numbers.kernel_spatial_dimensions
    return [
        dimension
        for dimension, window in zip(spatial, instruction.window.dimensions, strict=True)
        if window.window_reversal
    ]


def _compare_strictly(replacement: Replacement) -> None:
    original = replacement.original
    strict = replacement.add_copy("strict", original.shape, original.operand_ids)
    strict.comparison_direction = _STRICT[original.comparison_direction]
    # The computation names its root by this id.
    strict.id = original.id


def _reverse_kernel(replacement: Replacement) -> None:
    original = replacement.original
    image, kernel = original.operand_ids
    backwards = replacement.add("reverse", replacement.shape_of(kernel), [kernel])
    backwards.dimensions[:] = _reversed(original)
    forwards = replacement.add_copy("forwards", original.shape, [image, backwards.id])
    for window in forwards.window.dimensions:
        window.window_reversal = False
    # The original's users need no change.
    forwards.id = original.id


def _sums_batch(convolution: Instruction) -> bool:
    """Return whether a convolution is the gradient of a kernel: its window is larger than its result."""
    spatial = convolution.convolution_dimension_numbers.output_spatial_dimensions
    result = math.prod(convolution.shape.dimensions[dimension] for dimension in spatial)
    window = math.prod(dimension.size for dimension in convolution.window.dimensions)
    return convolution.batch_group_count > 1 or (convolution.feature_group_count <= 1 and window > result)


def _divide_batch(division: _Division, replacement: Replacement) -> None:
    original = replacement.original
    numbers = original.convolution_dimension_numbers
    # In the gradient of a kernel, these are the dimensions of the batch.
    dimensions = numbers.input_feature_dimension, numbers.kernel_input_feature_dimension
    operands = [
        division.add(replacement, operand, replacement.shape_of(operand), dimension)
        for operand, dimension in zip(original.operand_ids, dimensions, strict=True)
    ]
    divided = replacement.add_copy("divided", original.shape, operands)
    # The original's users need no change.
    divided.id = original.id


def _overlaps(pooling: Instruction) -> bool:
    """Return whether windows overlap, and none reaches over the first dimension."""
    first, *others = pooling.window.dimensions
    return first.size == 1 and any(window.size > window.stride for window in others)


def _divide_pooling(division: _Division, replacement: Replacement) -> None:
    original = replacement.original
    *arrays, initial = original.operand_ids
    operands = [division.add(replacement, array, replacement.shape_of(array), 0) for array in arrays]
    divided = replacement.add_copy("divided", original.shape, [*operands, initial])
    division.add(replacement, divided.id, original.shape, 0)
    # The original's users need no change.
    replacement.instructions[-1].id = original.id


def _copy_operands(replacement: Replacement) -> None:
    original = replacement.original
    copies = [
        replacement.add("copy", replacement.shape_of(operand), [operand]).id
        for operand in original.operand_ids
    ]
    alone = replacement.add_copy("alone", original.shape, copies)
    # The original's users need no change.
    alone.id = original.id


def _pack_operands(replacement: Replacement) -> None:
    """Concatenate the small operands of each dtype to one row, all-reduce the rows, split the results.

    For example, the operands f32[2], bf16[4], f32[3] and f32[600000] become the rows f32[5] (of the first and
    the third), bf16[4] and f32[600000]. There remains one all-reduce, now of three operands: several
    all-reduces could run in different orders on different replicas, and then none would end.

    Source: the idea is that of XLA's pass AllReduceContiguous, which is for GPUs.
    """
    original = replacement.original
    groups = _groups(original)
    rows = [_joined(replacement, group) for group in groups]
    shapes = [shape for _, shape in rows]
    together = shapes[0] if len(rows) == 1 else Shape(element_type=hlo.TUPLE, tuple_shapes=shapes)
    reduce = replacement.add_copy("packed", together, [id_ for id_, _ in rows])
    results: dict[int, int] = {}
    for index, group in enumerate(groups):
        row = reduce.id
        if len(groups) > 1:
            element = replacement.add("get-tuple-element", shapes[index], [reduce.id])
            element.tuple_index = index
            row = element.id
        results |= zip(group, _split(replacement, row, group), strict=True)
    # Grouping changed the order: the tuple restores that of the operands.
    replacement.add_tuple([results[position] for position in sorted(results)])


def _gather_and_combine(combine: str, count: int, replacement: Replacement) -> None:
    """Gather the operands of all replicas, one row for each replica, and combine the rows locally."""
    original = replacement.original
    every = range(len(original.operand_ids))
    joined, row = _joined(replacement, every, is_row=True)
    length = row.dimensions[0]
    one_row, table = _array(row, 1, length), _array(row, count, length)
    level = replacement.add("reshape", one_row, [joined])
    # A copy keeps the groups and the channel of the all-reduce. Each replica of a group adds a row.
    gather = replacement.add_copy("gathered", table, [level.id])
    gather.opcode, gather.dimensions[:], gather.called_computation_ids[:] = "all-gather", [0], []
    total = 0
    for index in range(count):
        part = replacement.add_slice(one_row, gather.id, (index, index + 1), (0, length))
        total = replacement.add(combine, one_row, [total, part.id]).id if index else part.id
    flat = replacement.add("reshape", row, [total])
    results = _split(replacement, flat.id, every, is_row=True)
    if original.shape.tuple_shapes:
        replacement.add_tuple(results)
    else:
        # The last instruction gives the only result its shape. The original's users need no change.
        replacement.instructions[-1].id = original.id


def result_shapes(instruction: Instruction) -> list[Shape]:
    """Return the shape of each array that an instruction computes."""
    return list(instruction.shape.tuple_shapes) or [instruction.shape]


def _groups(instruction: Instruction) -> list[list[int]]:
    """Return which operands of an all-reduce go together, by position; a large operand stays alone."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for position, shape in enumerate(result_shapes(instruction)):
        is_small = hlo.size_bytes(shape) <= PACKED_BYTES
        groups[shape.element_type, -1 if is_small else position].append(position)
    return list(groups.values())


def _joined(replacement: Replacement, group: Sequence[int], *, is_row: bool = False) -> tuple[int, Shape]:
    """Add the instructions that concatenate operands to one row; return id and shape of the row.

    A single operand needs no instruction, unless `is_row` asks for a row.
    """
    original = replacement.original
    operands = [(original.operand_ids[position], result_shapes(original)[position]) for position in group]
    if len(operands) == 1 and not is_row:
        return operands[0]
    flat = [replacement.add("reshape", _row([shape]), [id_]) for id_, shape in operands]
    row = _row([shape for _, shape in operands])
    joined = replacement.add("concatenate", row, [part.id for part in flat])
    joined.dimensions[:] = [0]
    return joined.id, row


def _split(replacement: Replacement, row: int, group: Sequence[int], *, is_row: bool = False) -> list[int]:
    """Add the instructions that undo `_joined`; return the id of each operand's result."""
    if len(group) == 1 and not is_row:
        return [row]
    results = []
    start = 0
    for position in group:
        shape = result_shapes(replacement.original)[position]
        flat = _row([shape])
        limit = start + flat.dimensions[0]
        part = replacement.add_slice(flat, row, (start, limit))
        results.append(replacement.add("reshape", shape, [part.id]).id)
        start = limit
    return results


def _row(shapes: Sequence[Shape]) -> Shape:
    return _array(shapes[0], sum(math.prod(shape.dimensions) for shape in shapes))


def _array(like: Shape, *sizes: int) -> Shape:
    return Shape(element_type=like.element_type, dimensions=sizes, is_dynamic_dimension=[False] * len(sizes))
