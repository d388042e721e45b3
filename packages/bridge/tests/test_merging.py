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
