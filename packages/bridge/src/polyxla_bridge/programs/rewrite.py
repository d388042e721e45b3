"""Programs said in another way: what jaxlib cannot convert, and what its CPU client does slowly."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from polyxla_bridge.programs import hlo

PACKED_BYTES = 1 << 20
"""Largest operand of an all-reduce that is packed with others, in bytes. The client reduces one operand
after the other, and each costs some messages there and back: 1.3 ms with 4 processes on 2 cores, which is
what copying some 4 MiB twice takes."""

BITWISE = ("and", "or")
"""The reductions that jaxlib's CPU client knows for truth values only."""

Rewrite = Callable[["Fresh", Any], list[Any]]
"""Returns the instructions that stand for one; the last has its id: what refers to it need not change."""


def for_jaxlib(module: bytes, replicas: int) -> bytes:
    """Return a serialised HloModuleProto as jaxlib takes it, and runs it best.

    - A reduce-scatter of several operands, which ``xm.reduce_scatter`` of a list sends, becomes one for
      each: StableHLO's has a single operand. Each has a channel of its own, or the runtime would take them
      for one another.
    - An all-to-all of one part, which goes nowhere, becomes that part: jaxlib 0.10.2 ends the process
      over it.
    - An all-reduce of whole numbers by "and" or "or", which the client refuses, becomes an all-gather whose
      parts are combined.
    - An all-reduce of several operands packs the small ones of each dtype into one.

    Args:
        module: the program.
        replicas: how many there are.
    """
    whole = hlo.parsed("Module", module)
    every = [one for computation in whole.computations for one in computation.instructions]
    opcodes = {one.id: one.opcode for one in every}
    known = _Known(replicas, {one.id: opcodes.get(one.root_id, "") for one in whole.computations})
    if not any(known.rewrite_of(one) for one in every):
        return module
    fresh = Fresh(every)
    for computation in whole.computations:
        instructions = list(computation.instructions)
        del computation.instructions[:]
        for one in instructions:
            rewrite = known.rewrite_of(one)
            computation.instructions.extend(rewrite(fresh, one) if rewrite else [one])
    data: bytes = whole.SerializeToString()
    return data


@dataclass(frozen=True)
class _Known:
    """What an instruction alone does not tell.

    Attributes:
        replicas: how many there are.
        roots: the opcode that each computation ends with, by the computation's id.
    """

    replicas: int
    roots: Mapping[int, str]

    def rewrite_of(self, one: Any) -> Rewrite | None:
        """Return what makes something else of an instruction; None if it stays."""
        if one.opcode == "reduce-scatter" and len(one.operand_ids) > 1:
            return _each_alone
        if one.opcode == "all-to-all" and len(one.shape.tuple_shapes) == 1:
            return _its_part
        if one.opcode != "all-reduce":
            return None
        combine = self.roots[one.called_computation_ids[0]]
        if combine in BITWISE and _shapes(one)[0].element_type != hlo.PRED:
            return partial(_gathered, combine, self._group_size(one))
        return _packed if len(_groups(one)) < len(one.operand_ids) else None

    def _group_size(self, one: Any) -> int:
        groups = one.device_list.replica_groups or one.replica_groups
        return len(groups[0].replica_ids) if groups else self.replicas


class Fresh:
    """Makes instructions, with ids and channels that no other one of the module has.

    Args:
        every: the module's instructions.
    """

    def __init__(self, every: Sequence[Any]) -> None:
        self.channels = itertools.count(max(one.channel_id for one in every) + 1)
        # The upper half of an id may say which computation it is in: only the lower half is counted on.
        self._lower = itertools.count(max(one.id % 2**32 for one in every) + 1)

    def copy(self, one: Any, what: str, shape: Any, operands: Sequence[int]) -> Any:
        """Return an instruction like `one`, of another shape and other operands."""
        copy = hlo.MESSAGES["Instruction"]()
        copy.CopyFrom(one)
        return self._named(copy, one, what, shape, operands)

    def new(self, one: Any, opcode: str, shape: Any, operands: Sequence[int], **fields: Any) -> Any:
        """Return an instruction that is part of what `one` becomes."""
        made = hlo.MESSAGES["Instruction"](opcode=opcode, metadata=one.metadata, **fields)
        return self._named(made, one, opcode, shape, operands)

    def _named(self, made: Any, one: Any, what: str, shape: Any, operands: Sequence[int]) -> Any:
        lower = next(self._lower)
        made.name, made.id = f"{one.name}.{what}.{lower}", one.id // 2**32 * 2**32 + lower
        made.shape.CopyFrom(shape)
        made.operand_ids[:] = operands
        return made


def _each_alone(fresh: Fresh, one: Any) -> list[Any]:
    parts = zip(one.shape.tuple_shapes, one.operand_ids, strict=True)
    singles = [fresh.copy(one, "part", shape, [operand]) for shape, operand in parts]
    for single in singles if one.channel_id else ():
        single.channel_id = next(fresh.channels)
    return [*singles, _tuple(one, [single.id for single in singles])]


def _its_part(fresh: Fresh, one: Any) -> list[Any]:
    return [_tuple(one, one.operand_ids)]


def _shapes(one: Any) -> list[Any]:
    return list(one.shape.tuple_shapes) or [one.shape]


def _groups(one: Any) -> list[list[int]]:
    """Return which operands of an all-reduce go together, by their positions; a large one goes alone."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for position, shape in enumerate(_shapes(one)):
        is_small = hlo.size_bytes(shape) <= PACKED_BYTES
        groups[shape.element_type, -1 if is_small else position].append(position)
    return list(groups.values())


def _packed(fresh: Fresh, one: Any) -> list[Any]:
    """Pack, reduce and unpack. It stays one all-reduce: several could come in another order elsewhere.

    Source: the idea is that of XLA's pass AllReduceContiguous, which is for GPUs.
    """
    groups, made, rows = _groups(one), [], []
    for group in groups:
        joined = _joined(fresh, one, group) if len(group) > 1 else []
        made += joined
        rows.append((joined[-1].id, joined[-1].shape) if joined else _operand(one, group[0]))
    shapes = [shape for _, shape in rows]
    together = hlo.MESSAGES["Shape"](element_type=hlo.TUPLE, tuple_shapes=shapes)
    reduce = fresh.copy(one, "packed", together if len(rows) > 1 else shapes[0], [id_ for id_, _ in rows])
    made.append(reduce)
    parts: dict[int, int] = {}
    for index, group in enumerate(groups):
        row = reduce.id
        if len(groups) > 1:
            made.append(fresh.new(one, "get-tuple-element", shapes[index], [reduce.id], tuple_index=index))
            row = made[-1].id
        cuts = _cut(fresh, one, row, group) if len(group) > 1 else []
        made += cuts
        parts |= dict(zip(group, [cut.id for cut in cuts[1::2]] or [row], strict=True))
    return [*made, _tuple(one, [parts[position] for position in sorted(parts)])]


def _gathered(combine: str, count: int, fresh: Fresh, one: Any) -> list[Any]:
    """Gather what all have, a row each, and combine the rows here."""
    every = range(len(one.operand_ids))
    made = _joined(fresh, one, every)
    row = made[-1].shape
    length = row.dimensions[0]
    level, table = _array(row, 1, length), _array(row, count, length)
    made.append(fresh.new(one, "reshape", level, [made[-1].id]))
    gather = fresh.copy(one, "gathered", table, [made[-1].id])
    gather.opcode, gather.dimensions[:], gather.called_computation_ids[:] = "all-gather", [0], []
    made.append(gather)
    total = 0
    for index in range(count):
        where = [_slice(index, index + 1), _slice(0, length)]
        made.append(fresh.new(one, "slice", level, [gather.id], slice_dimensions=where))
        if index:
            made.append(fresh.new(one, combine, level, [total, made[-1].id]))
        total = made[-1].id
    made.append(fresh.new(one, "reshape", row, [total]))
    cuts = _cut(fresh, one, made[-1].id, every)
    if one.shape.tuple_shapes:
        return [*made, *cuts, _tuple(one, [cut.id for cut in cuts[1::2]])]
    cuts[-1].id = one.id
    return [*made, *cuts]


def _operand(one: Any, position: int) -> tuple[int, Any]:
    return one.operand_ids[position], _shapes(one)[position]


def _joined(fresh: Fresh, one: Any, group: Sequence[int]) -> list[Any]:
    """Return what makes one row of operands; the row comes last."""
    operands = [_operand(one, position) for position in group]
    flat = [fresh.new(one, "reshape", _row([shape]), [id_]) for id_, shape in operands]
    row = _row([shape for _, shape in operands])
    return [*flat, fresh.new(one, "concatenate", row, [part.id for part in flat], dimensions=[0])]


def _cut(fresh: Fresh, one: Any, row: int, group: Sequence[int]) -> list[Any]:
    """Return a slice and a reshape for each of the operands that a row was joined of."""
    made: list[Any] = []
    start = 0
    for position in group:
        _, shape = _operand(one, position)
        flat = _row([shape])
        limit = start + flat.dimensions[0]
        made.append(fresh.new(one, "slice", flat, [row], slice_dimensions=[_slice(start, limit)]))
        made.append(fresh.new(one, "reshape", shape, [made[-1].id]))
        start = limit
    return made


def _slice(start: int, limit: int) -> Any:
    return hlo.MESSAGES["Slice"](start=start, limit=limit, stride=1)


def _row(shapes: Sequence[Any]) -> Any:
    return _array(shapes[0], sum(math.prod(shape.dimensions) for shape in shapes))


def _array(like: Any, *sizes: int) -> Any:
    return hlo.MESSAGES["Shape"](
        element_type=like.element_type, dimensions=sizes, is_dynamic_dimension=[False] * len(sizes)
    )


def _tuple(one: Any, operands: Sequence[int]) -> Any:
    made = hlo.MESSAGES["Instruction"](name=one.name, opcode="tuple", id=one.id, metadata=one.metadata)
    made.shape.CopyFrom(one.shape)
    made.operand_ids[:] = operands
    return made
