"""Collectives as calls of the C library, which passes arrays through memory that the replicas share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from polyxla_bridge.programs import hlo, rewrite
from polyxla_bridge.programs.hlo_pb2 import HloInstructionProto as Instruction
from polyxla_bridge.programs.hlo_pb2 import ShapeProto as Shape

_REDUCTIONS = ("add", "multiply", "minimum", "maximum", "and", "or", "xor")
"""In the order of `Reduction` in native/reduction.h."""
_OF_BOOLEANS = {"add": "or", "maximum": "or", "multiply": "and", "minimum": "and"}
"""Reductions of numbers that booleans have, too."""
_TOGETHER = ("all-reduce", "all-to-all")
"""Collectives whose operands go together."""
_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_FLOATS = frozenset(("float32", "float64", "bfloat16"))
_COPIED = frozenset(("float16", "complex64", "complex128"))
"""Dtypes that are not reduced."""
_U32, _TYPED_FFI = 8, 4
"""Source: ``PrimitiveType`` in xla/xla_data.proto, ``CustomCallApiVersion`` in xla/service/hlo.proto."""


def rewritten(module: bytes, replicas: int, devices: Sequence[int]) -> bytes:
    """Replace the collectives of a program that the C library has.

    Whether it has one follows from the collective alone: replicas may meet in different programs. Those in a
    loop or a branch stay, because no ticket would keep them in order.

    Args:
        module: a serialised HloModuleProto, not partitioned.
        replicas: number of the program's replicas.
        devices: the replicas' numbers in the job; empty if they are the same.

    Returns:
        The rewritten program; `module` itself if nothing was replaced.
    """
    parsed = hlo.parse_module(module)
    reductions = hlo.reductions(parsed)
    calls = {
        instruction.id: call
        for instruction in hlo.entry_of(parsed).instructions
        if (call := _call(instruction, replicas, devices, reductions)) is not None
    }
    chain = _Chain()

    def rewrite_of(instruction: Instruction) -> rewrite.Rewrite | None:
        call = calls.get(instruction.id)
        return partial(call.replace, chain) if call else None

    return rewrite.rewritten(module, parsed, rewrite_of)


@dataclass
class _Chain:
    """What each call gets from the one before.

    Attributes:
        replica: id of the instruction that is this replica's number in the program.
        ticket: id of the last call's ticket, for which the next call waits.
    """

    replica: int = 0
    ticket: int = 0


@dataclass(frozen=True)
class _Call:
    """How a collective is called.

    Attributes:
        target: the C function.
        parts: positions of the operands that go together, and the number of their reduction.
        attributes: of the call, without the reduction.
        is_in_place: whether each result takes the memory of its operand.
    """

    target: str
    parts: Sequence[tuple[Sequence[int], int]]
    attributes: Mapping[str, str]
    is_in_place: bool

    def replace(self, chain: _Chain, replacement: rewrite.Replacement) -> None:
        original = replacement.original
        number = Shape(element_type=_U32)
        if not chain.replica:
            chain.replica = chain.ticket = replacement.add("replica-id", number, []).id
        results: dict[int, int] = {}
        for part, reduction in self.parts:
            operands = [original.operand_ids[position] for position in part]
            shapes = [rewrite.result_shapes(original)[position] for position in part]
            laid_out = [_laid_out(shape) for shape in (*shapes, number)]
            together = Shape(element_type=hlo.TUPLE, tuple_shapes=laid_out)
            call = replacement.add("custom-call", together, [*operands, chain.replica, chain.ticket])
            call.custom_call_target = self.target
            call.custom_call_api_version = _TYPED_FFI
            # A replica whose program does not use the result must take part all the same.
            call.custom_call_has_side_effect = True
            call.constrain_layout = True
            given = [*map(replacement.shape_of, operands), number, number]
            call.operand_shapes_with_layout.extend(map(_laid_out, given))
            if self.is_in_place:
                for index in range(len(part)):
                    call.output_operand_aliasing.add(output_shape_index=[index], operand_index=index)
            attributes = {**self.attributes, "reduction": f"{reduction} : i64"}
            text = ", ".join(f"{name} = {value}" for name, value in attributes.items())
            call.backend_config = f"{{{text}}}".encode()
            *elements, ticket = (
                self._element(replacement, shape, call.id, index)
                for index, shape in enumerate((*shapes, number))
            )
            chain.ticket = ticket
            results |= zip(part, elements, strict=True)
        if original.shape.tuple_shapes:
            replacement.add_tuple([results[position] for position in sorted(results)])
        else:
            # The original's users need no change.
            replacement.instructions[-2].id = original.id

    def _element(self, replacement: rewrite.Replacement, shape: Shape, call: int, index: int) -> int:
        element = replacement.add("get-tuple-element", shape, [call])
        element.tuple_index = index
        return element.id


def _call(
    instruction: Instruction, replicas: int, devices: Sequence[int], reductions: Mapping[int, str]
) -> _Call | None:
    """Return how a collective is called; None if the C library does not have it."""
    target = hlo.SHARED_TARGETS.get(instruction.opcode)
    if target is None:
        return None
    groups = hlo.listed_groups(instruction) or [list(range(replicas))]
    if instruction.opcode == "collective-permute":
        groups = [[pair.source, pair.target] for pair in instruction.source_target_pairs]
        # In more operands, it writes into parts of arrays.
        if len(instruction.operand_ids) > 1:
            return None
    if len({len(group) for group in groups}) > 1:
        return None
    # In those that are left out here, a replica without a group gets zeros.
    is_complete = sorted(member for group in groups for member in group) == list(range(replicas))
    if instruction.opcode not in ("collective-permute", "collective-broadcast") and not is_complete:
        return None
    attributes = {
        "groups": _numbers([member for group in groups for member in group]),
        # A permute may have no pairs.
        "group_size": f"{len(groups[0]) if groups else 0} : i64",
        "devices": _numbers(devices),
    }
    # An all-to-all without a dimension has an operand for each member of the group.
    attributes["dimension"] = f"{instruction.dimensions[0] if instruction.dimensions else -1} : i64"
    reduction = next((reductions[id_] for id_ in instruction.called_computation_ids), None)
    parts: dict[str, tuple[list[int], int]] = {}
    for position, shape in enumerate(rewrite.result_shapes(instruction)):
        dtype, _ = hlo.array_type(shape)
        number = _reduction(reduction, dtype)
        if number is None:
            return None
        # The others have one operand, or one for each of several results.
        key = dtype if instruction.opcode in _TOGETHER else str(position)
        parts.setdefault(key, ([], number))[0].append(position)
    return _Call(target, list(parts.values()), attributes, instruction.opcode == "all-reduce")


def _numbers(numbers: Sequence[int]) -> str:
    return f"array<i64: {', '.join(map(str, numbers))}>" if numbers else "array<i64>"


def _reduction(name: str | None, dtype: str) -> int | None:
    """Return the number of a reduction, 0 if a collective has none; None if it is not known."""
    if dtype == "bool":
        name = _OF_BOOLEANS.get(name or "", name)
        known: Sequence[str] = _REDUCTIONS[4:]
    else:
        known = _REDUCTIONS if dtype in _INTEGERS else _REDUCTIONS[:4] if dtype in _FLOATS else ()
    if name is None:
        return 0 if known or dtype in _COPIED else None
    return _REDUCTIONS.index(name) if name in known else None


def _laid_out(shape: Shape) -> Shape:
    """Return a shape whose last dimension is the innermost, as the C library reads arrays."""
    made = Shape(element_type=shape.element_type, dimensions=shape.dimensions)
    made.is_dynamic_dimension[:] = [False] * len(shape.dimensions)
    made.layout.minor_to_major[:] = reversed(range(len(shape.dimensions)))
    return made
