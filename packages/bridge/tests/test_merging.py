"""Programs of replicas that differ, merged into one."""

from __future__ import annotations

import numpy as np
import pytest

from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.merging import merged
from polyxla_testing.engine_conformance import ADD, OPTIONS, OpenEngine, download, module, upload


@pytest.fixture
def open_engine(open_on_plugin: OpenEngine) -> OpenEngine:
    return open_on_plugin


def program(body: str, computations: str = ADD) -> bytes:
    return module(f"HloModule one, replica_count=2\n{computations}\nENTRY main {{ {body} }}")


SUM = "ROOT r = f32[] all-reduce(y), replica_groups={}, to_apply=add"


def opcodes(code: bytes) -> list[str]:
    (entry,) = hlo.parse_module(code).computations[-1:]
    return [instruction.opcode for instruction in entry.instructions]


def test_what_is_the_same_is_there_once() -> None:
    body = "x = f32[] parameter(0) k = f32[] constant({}) a = f32[] sine(x) y = f32[] multiply(a, k) "
    found = merged([program(body.format(number) + SUM) for number in (2, 3)])
    assert opcodes(found.module).count("sine") == 1
    assert opcodes(found.module).count("multiply") == 2
    assert opcodes(found.module).count("all-reduce") == 1
    assert found.arguments == ((0,), (0,))


def test_each_replica_has_arguments_of_its_own() -> None:
    one = program("x = f32[2] parameter(0) z = f32[] parameter(1) y = f32[] negate(z) " + SUM)
    two = program("z = f32[] parameter(0) y = f32[] negate(z) " + SUM)
    found = merged([one, two])
    assert hlo.parameters(found.module) == [("float32", (2,)), ("float32", ())]
    assert found.arguments == ((0, 1), (None, 0))


def test_computations_that_differ_are_kept_apart() -> None:
    body = (
        "x = f32[4] parameter(0) z = f32[] constant(0) "
        "y = f32[] reduce(x, z), dimensions={0}, to_apply=inner " + SUM
    )
    inner = "inner { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] NAME(a, b) }"
    modules = [program(body, f"{ADD}\n{inner.replace('NAME', name)}") for name in ("add", "maximum")]
    found = merged(modules)
    assert len(hlo.parse_module(found.module).computations) == 3
    assert opcodes(found.module).count("reduce") == 2


def test_random_numbers_of_one_program_stay_different() -> None:
    body = (
        "a = f32[] constant(0) b = f32[] constant(1) "
        "u = f32[] rng(a, b), distribution=rng_uniform v = f32[] rng(a, b), distribution=rng_uniform "
        "w = f32[] subtract(u, v) k = f32[] constant({}) y = f32[] multiply(w, k) "
    )
    found = merged([program(body.format(number) + SUM) for number in (2, 3)])
    assert opcodes(found.module).count("rng") == 4


def test_random_numbers_of_called_computations_stay_different() -> None:
    inner = (
        "inner { a = f32[] parameter(0) b = f32[] constant(1) "
        "ROOT u = f32[] rng(a, b), distribution=rng_uniform }"
    )
    body = (
        "a = f32[] constant(0) u = f32[] call(a), to_apply=inner v = f32[] call(a), to_apply=inner "
        "w = f32[] subtract(u, v) k = f32[] constant({}) y = f32[] multiply(w, k) "
    )
    found = merged([program(body.format(number) + SUM, f"{ADD}\n{inner}") for number in (2, 3)])
    assert opcodes(found.module).count("call") == 4


@pytest.mark.parametrize(
    "other",
    [
        "x = f32[] parameter(0) ROOT r = f32[] negate(x)",
        "x = f32[] parameter(0) y = f32[] all-reduce(x), replica_groups={}, to_apply=add " + SUM,
        "x = f32[2] parameter(0) ROOT r = f32[2] all-reduce(x), replica_groups={}, to_apply=add",
        "x = f32[] parameter(0) ROOT r = f32[] all-reduce(x), replica_groups={{0},{1}}, to_apply=add",
    ],
    ids=["none", "more", "another shape", "other groups"],
)
def test_programs_with_other_collectives_are_refused(other: str) -> None:
    first = program("y = f32[] parameter(0) " + SUM)
    with pytest.raises(
        PjrtError, match=r"too different \(one\)|replica 1 all-reduce \(add\) of float32\[2\]\."
    ):
        merged([first, program(other)])


@pytest.mark.parametrize("is_first", [True, False])
def test_a_result_that_only_one_program_computes_together_is_refused(is_first: bool) -> None:
    modules = [program("y = f32[] parameter(0) " + root) for root in (SUM, "ROOT r = f32[] negate(y)")]
    with pytest.raises(PjrtError, match="too different"):
        merged(modules if is_first else modules[::-1])


CALLING = {
    "call": (
        "inner { x = f32[2] parameter(0) ROOT y = f32[2] all-reduce(x), replica_groups={}, to_apply=add }",
        "r = f32[2] call(y), to_apply=inner",
    ),
    "nested call": (
        """deep { x = f32[2] parameter(0) ROOT y = f32[2] all-reduce(x), replica_groups={}, to_apply=add }
        inner { x = f32[2] parameter(0) ROOT y = f32[2] call(x), to_apply=deep }""",
        "r = f32[2] call(y), to_apply=inner",
    ),
    "conditional": (
        """sum { x = f32[2] parameter(0) ROOT y = f32[2] all-reduce(x), replica_groups={}, to_apply=add }
        same { x = f32[2] parameter(0) ROOT y = f32[2] copy(x) }""",
        """p = pred[] constant(true)
        r = f32[2] conditional(p, y, y), true_computation=sum, false_computation=same""",
    ),
    "while": (
        """body { s = (s32[], f32[2]) parameter(0) i = s32[] get-tuple-element(s), index=0
        x = f32[2] get-tuple-element(s), index=1 one = s32[] constant(1) j = s32[] add(i, one)
        y = f32[2] all-reduce(x), replica_groups={}, to_apply=add ROOT t = (s32[], f32[2]) tuple(j, y) }
        once { s = (s32[], f32[2]) parameter(0) i = s32[] get-tuple-element(s), index=0
        one = s32[] constant(1) ROOT l = pred[] compare(i, one), direction=LT }""",
        """z = s32[] constant(0) t = (s32[], f32[2]) tuple(z, y)
        w = (s32[], f32[2]) while(t), condition=once, body=body r = f32[2] get-tuple-element(w), index=1""",
    ),
}
"""How a program comes to a collective that is not among its own instructions: what it calls, and the call."""


@pytest.mark.parametrize("kind", CALLING)
def test_replicas_meet_in_what_their_programs_call(kind: str, open_engine: OpenEngine) -> None:
    engine = open_engine(2)
    called, call = CALLING[kind]
    body = (
        "x = f32[2] parameter(0) k = f32[] constant({}) b = f32[2] broadcast(k), dimensions={{}} "
        f"y = f32[2] add(x, b) {call} ROOT both = (f32[2], f32[2]) tuple(r, y)"
    )
    results = []
    for device, number, row in zip(engine.devices, (0, 100), ([1, 2], [10, 20]), strict=True):
        one = engine.compile(program(body.format(number), f"{ADD}\n{called}"), OPTIONS)
        results.append(engine.execute(one, device, [upload(engine, np.array(row, np.float32), device.index)]))
    assert [[download(engine, argument).tolist() for argument in row] for row in results] == [
        [[111, 122], [1, 2]],
        [[111, 122], [110, 120]],
    ]


def test_called_collectives_that_differ_are_refused() -> None:
    inner = (
        "inner {{ x = f32[] parameter(0) k = f32[] constant({}) y = f32[] multiply(x, k) "
        "ROOT r = f32[] all-reduce(y), replica_groups={{}}, to_apply=add }}"
    )
    body = "x = f32[] parameter(0) ROOT r = f32[] call(x), to_apply=inner"
    with pytest.raises(PjrtError, match="too different"):
        merged([program(body, f"{ADD}\n{inner.format(number)}") for number in (2, 3)])


def test_results_of_other_shapes_are_refused() -> None:
    body = (
        "x = f32[{0}] parameter(0) y = f32[] constant(1) "
        "s = f32[] all-reduce(y), replica_groups={{}}, to_apply=add "
        "b = f32[{0}] broadcast(s), dimensions={{}} ROOT t = f32[{0}] add(x, b)"
    )
    with pytest.raises(PjrtError, match="results of the same shapes"):
        merged([program(body.format(number)) for number in (2, 3)])


def test_a_result_of_its_own_reaches_each_replica(open_engine: OpenEngine) -> None:
    engine = open_engine(2)
    body = (
        "x = f32[] parameter(0) k = f32[] constant({}) y = f32[] multiply(x, k) "
        "r = f32[] all-reduce(y), replica_groups={{}}, to_apply=add "
        "z = f32[] {}(r) ROOT t = (f32[], f32[], f32[]) tuple(r, y, z)"
    )
    results = []
    for device, number, name in zip(engine.devices, (2, 5), ("negate", "abs"), strict=True):
        one = engine.compile(program(body.format(number, name)), OPTIONS)
        results.append(engine.execute(one, device, [upload(engine, np.float32(10), device.index)]))
    assert [[float(download(engine, argument)) for argument in row] for row in results] == [
        [70, 20, -70],
        [70, 50, 70],
    ]
