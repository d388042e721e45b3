"""Collectives through memory that the replicas of a machine share."""

from __future__ import annotations

import functools
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from subprocess import Popen
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla.plugin import free_ports
from polyxla_bridge import native
from polyxla_bridge.engine.clients import numpy_dtype
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.engine.shared_memory import SharedMemory
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo, shared_collectives
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_bridge.shared_file import SharedFile

TIMEOUT_S = 60
REPLICAS = 4
NAMES = {"bool": "pred", "float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}
NAMES |= {f"{sign}int{bits}": f"{sign or 's'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
REDUCTIONS = {
    "add": np.add,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
BUFFER = 1 << 20
"""Size of a replica's buffer in a job of four."""
LARGE = 8 << 20
"""Bytes of a result that is written past the caches."""


@pytest.fixture(scope="module")
def make_engine() -> Iterator[Callable[..., JaxEngine]]:
    """Return a function that opens an engine of four replicas in this process."""
    engines: list[JaxEngine] = []

    def make_engine(**settings: Any) -> JaxEngine:
        (port,) = free_ports(1)
        engines.append(JaxEngine(BridgeSettings(REPLICAS, 1, 0, f"127.0.0.1:{port}", **settings)))
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., JaxEngine]) -> JaxEngine:
    engine = make_engine()
    assert engine._clients.memory.is_shared
    return engine


@pytest.fixture(scope="module")
def on_gloo(engine: JaxEngine, make_engine: Callable[..., JaxEngine]) -> JaxEngine:
    """An engine without shared memory, because this process has a job with some already."""
    other = make_engine()
    assert not other._clients.memory.is_shared
    return other


Groups = tuple[tuple[int, ...], ...]
SHAPES = [(4, 8, 4), (40, 8, 1032)]
COPIED = ["float32", "float16", "complex128", "bool"]
NAMES |= {"complex128": "c128"}


def listed(groups: Groups) -> str:
    """Return groups as HLO writes them."""
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def reducing(shape: str) -> str:
    """Return a program's body that reduces its argument over all replicas."""
    return f"x = {shape} parameter(0) ROOT r = {shape} all-reduce(x), replica_groups={{}}, to_apply=combine"


def program(engine: JaxEngine, body: str, reduction: str = "add", dtype: str = "f32") -> Executable:
    text = f"""HloModule shared, replica_count={REPLICAS}
      combine {{ a = {dtype}[] parameter(0) b = {dtype}[] parameter(1) ROOT c = {dtype}[] {reduction}(a, b) }}
      ENTRY main {{ {body} }}"""
    module = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return engine.compile(module, xla_client.CompileOptions().SerializeAsString())


def run(
    engine: JaxEngine, executable: Executable, arguments: Sequence[Sequence[np.ndarray[Any, Any]]]
) -> list[list[np.ndarray[Any, Any]]]:
    """Execute a program on all replicas; return each one's results."""
    results = []
    for device, row in zip(engine.devices, arguments, strict=True):
        buffers = [
            engine.from_host(
                device,
                ArrayType(argument.dtype.name, argument.shape),
                np.ascontiguousarray(argument).reshape(-1).view(np.uint8).data,
            )
            for argument in row
        ]
        results.append(engine.execute(executable, device, buffers))
    return [
        [
            np.frombuffer(engine.to_host(result).result(TIMEOUT_S), numpy_dtype(type_.dtype)).reshape(
                type_.dims
            )
            for result, type_ in zip(row, executable.outputs, strict=True)
        ]
        for row in results
    ]


def numbers(dtype: str, shape: tuple[int, ...], seed: int = 0) -> list[np.ndarray[Any, Any]]:
    chance = np.random.default_rng(seed)
    if dtype == "bool":
        return [chance.random(shape) < 0.5 for _ in range(REPLICAS)]
    if dtype.startswith(("int", "uint")):
        return [chance.integers(0, 120, shape).astype(dtype) for _ in range(REPLICAS)]
    return [chance.normal(size=shape).astype(numpy_dtype(dtype)) for _ in range(REPLICAS)]


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [
        (dtype, reduction)
        for dtype in NAMES
        for reduction in REDUCTIONS
        if dtype not in COPIED[1:] and ("float" not in dtype or reduction not in ("and", "or", "xor"))
    ],
)
def test_an_all_reduce_combines_in_the_order_of_the_replicas(
    engine: JaxEngine, dtype: str, reduction: str
) -> None:
    shape = (BUFFER // 3 + 7,)
    name = NAMES[dtype]
    executable = program(engine, reducing(f"{name}[{shape[0]}]"), reduction, name)
    assert hlo.shares_memory(executable.optimized_hlo)
    given = numbers(dtype, shape)
    wide = [row.astype(np.float32) if dtype == "bfloat16" else row for row in given]
    expected = functools.reduce(REDUCTIONS[reduction], wide).astype(given[0].dtype)
    found = run(engine, executable, [[row] for row in given])
    assert all(row.tobytes() == expected.tobytes() for (row,) in found)


@pytest.mark.parametrize(
    ("reduction", "same"), [("add", "or"), ("maximum", "or"), ("multiply", "and"), ("minimum", "and")]
)
def test_booleans_are_combined_as_truth_values(engine: JaxEngine, reduction: str, same: str) -> None:
    given = numbers("bool", (1000,))
    for name in (reduction, same, "xor"):
        executable = program(engine, reducing("pred[1000]"), name, "pred")
        assert hlo.shares_memory(executable.optimized_hlo)
        expected = functools.reduce(REDUCTIONS[same if name == reduction else name], given)
        assert all((row == expected).all() for (row,) in run(engine, executable, [[row] for row in given]))


@pytest.mark.parametrize("reduction", ["minimum", "maximum"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_nan_of_any_replica_stays(engine: JaxEngine, reduction: str, dtype: str) -> None:
    given = [np.ones(REPLICAS, numpy_dtype(dtype)) for _ in range(REPLICAS)]
    for replica, row in enumerate(given):
        row[replica] = np.nan
    name = NAMES[dtype]
    found = run(engine, program(engine, reducing(f"{name}[4]"), reduction, name), [[row] for row in given])
    assert all(np.isnan(row.astype(np.float32)).all() for (row,) in found)


def test_bfloat16_is_rounded_once_and_keeps_infinity(engine: JaxEngine) -> None:
    # 256 + 1 + 1 + 1 is 259, to the nearest bfloat16 260; rounded after each sum, it would stay 256.
    given = [np.array([256, np.inf, 3e38, -0.0]), *[np.array([1, 1, 3e38, -0.0])] * 3]
    rows = [[row.astype(ml_dtypes.bfloat16)] for row in given]
    for (found,) in run(engine, program(engine, reducing("bf16[4]"), "add", "bf16"), rows):
        assert found.astype(np.float32).tolist() == [260, np.inf, np.inf, 0]
        assert np.signbit(found.astype(np.float32)[3])


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (1,),
        (0,),
        (3, 0, 2),
        (1 << 13,),
        (1 << 13 | 1,),
        (BUFFER // 4,),
        (BUFFER // 4 + 1,),
        (5, 7, 30011),
        (LARGE // 4 + 1,),
    ],
    ids=str,
)
def test_arrays_of_any_size_are_summed(engine: JaxEngine, shape: tuple[int, ...]) -> None:
    given = numbers("float32", shape)
    text = ",".join(map(str, shape))
    expected = ((given[0] + given[1]) + given[2]) + given[3]
    for (found,) in run(engine, program(engine, reducing(f"f32[{text}]")), [[row] for row in given]):
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("length", [300000, LARGE // 4 + 3])
def test_a_list_of_arrays_of_several_dtypes_is_summed(engine: JaxEngine, length: int) -> None:
    body = f"""x = f32[3,5] parameter(0)
      y = s32[7] parameter(1)
      z = f32[{length}] parameter(2)
      t = f32[] constant(0)
      sum = (f32[3,5], s32[7], f32[{length}], f32[]) all-reduce(x, y, z, t),
        replica_groups={{{{0,1,2,3}}}}, to_apply=combine
      a = f32[3,5] get-tuple-element(sum), index=0
      b = s32[7] get-tuple-element(sum), index=1
      c = f32[{length}] get-tuple-element(sum), index=2
      ROOT r = (f32[3,5], s32[7], f32[{length}]) tuple(a, b, c)"""
    columns = [numbers("float32", (3, 5)), numbers("int32", (7,)), numbers("float32", (length,))]
    executable = program(engine, body)
    assert hlo.shares_memory(executable.optimized_hlo)
    expected = [((a + b) + c) + d for a, b, c, d in columns]
    for found in run(engine, executable, list(zip(*columns, strict=True))):
        for mine, right in zip(found, expected, strict=True):
            assert mine.tobytes() == right.tobytes()


@pytest.mark.parametrize("is_first", [True, False])
def test_booleans_in_a_list_have_a_reduction_of_their_own(engine: JaxEngine, is_first: bool) -> None:
    columns = [("pred[9]", numbers("bool", (9,))), ("f32[5]", numbers("float32", (5,)))]
    (one, of_one), (two, of_two) = columns if is_first else columns[::-1]
    body = f"""x = {one} parameter(0) y = {two} parameter(1)
      ROOT r = ({one}, {two}) all-reduce(x, y), replica_groups={{}}, to_apply=combine"""
    executable = program(engine, body, "maximum")
    assert hlo.shares_memory(executable.optimized_hlo)
    expected = [functools.reduce(np.maximum, column).tolist() for column in (of_one, of_two)]
    for found in run(engine, executable, list(zip(of_one, of_two, strict=True))):
        assert [row.tolist() for row in found] == expected


@pytest.mark.parametrize(
    ("dtype", "reducing_more"),
    [
        ("f32", "p = f32[] abs(a) q = f32[] abs(b) ROOT c = f32[] maximum(p, q)"),
        ("f32", "ROOT c = f32[] add(a, a)"),
        ("s32", "p = s32[] not(a) ROOT c = s32[] and(p, b)"),
    ],
)
def test_a_reduction_that_does_more_is_not_taken_for_its_last_operation(
    engine: JaxEngine, dtype: str, reducing_more: str
) -> None:
    text = f"""HloModule more, replica_count={REPLICAS}
      combine {{ a = {dtype}[] parameter(0) b = {dtype}[] parameter(1) {reducing_more} }}
      ENTRY main {{ {reducing(f"{dtype}[4]")} }}"""
    module = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    with pytest.raises(Exception, match="Unsupported reduction computation"):
        engine.compile(module, xla_client.CompileOptions().SerializeAsString())


@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter, dimensions={0}"])
def test_a_reduction_that_the_library_lacks_is_an_error(
    engine: JaxEngine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    name, _, more = kind.partition(",")
    size = 1024 if name == "all-reduce" else 256
    body = f"""x = f32[1024] parameter(0)
      ROOT r = f32[{size}] {name}(x), replica_groups={{{{0,1,2,3}}}}, to_apply=combine{more and ","}{more}"""
    # The compiler asks for none of these, so a number that it does not give stands for one.
    with monkeypatch.context() as patched:
        patched.setattr(shared_collectives, "_reduction", lambda *_: 4)
        executable = program(engine, body)
    given = [[row] for row in numbers("float32", (1024,))]
    with pytest.raises(Exception, match="reduction 4 of numbers of type 11 is not known"):
        run(engine, executable, given)
    # The replicas still agree on what comes next.
    (expected,) = functools.reduce(np.add, np.array(given))
    found = run(engine, program(engine, reducing("f32[1024]")), given)
    assert [row.tobytes() for (row,) in found] == [expected.tobytes()] * REPLICAS


def test_an_operand_that_is_used_again_stays_as_it_was(engine: JaxEngine) -> None:
    body = """x = f32[1000] parameter(0)
      s = f32[1000] all-reduce(x), replica_groups={}, to_apply=combine
      ROOT r = (f32[1000], f32[1000]) tuple(x, s)"""
    given = numbers("float32", (1000,))
    found = run(engine, program(engine, body), [[row] for row in given])
    for mine, (kept, total) in zip(given, found, strict=True):
        assert kept.tobytes() == mine.tobytes()
        assert total.tobytes() == (((given[0] + given[1]) + given[2]) + given[3]).tobytes()


def test_an_operand_may_have_any_layout(engine: JaxEngine) -> None:
    body = """x = f32[70,90]{0,1} parameter(0)
      s = f32[70,90]{0,1} all-reduce(x), replica_groups={}, to_apply=combine
      ROOT r = f32[90,70] transpose(s), dimensions={1,0}"""
    given = numbers("float32", (70, 90))
    for (found,) in run(engine, program(engine, body), [[row] for row in given]):
        assert found.tobytes() == np.ascontiguousarray(sum(given[1:], given[0]).T).tobytes()


@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("groups", [((0, 1, 2, 3),), ((2, 0), (1, 3)), ((0,), (1,), (2,), (3,))], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 2), (40, 7, 1031), (40, 7, 9001)], ids=str)
def test_arrays_are_gathered_along_any_dimension(
    engine: JaxEngine, dimension: int, groups: Groups, shape: tuple[int, ...]
) -> None:
    whole = list(shape)
    whole[dimension] *= len(groups[0])
    before, after = (",".join(map(str, sizes)) for sizes in (shape, whole))
    body = f"x = f32[{before}] parameter(0) "
    body += (
        f"ROOT r = f32[{after}] all-gather(x), replica_groups={listed(groups)}, dimensions={{{dimension}}}"
    )
    executable = program(engine, body)
    given = numbers("float32", shape)
    found = run(engine, executable, [[row] for row in given])
    for group in groups:
        expected = np.concatenate([given[member] for member in group], dimension)
        assert {found[replica][0].tobytes() for replica in group} == {expected.tobytes()}


@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("groups", [((0, 1, 2, 3),), ((2, 0), (1, 3))], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_scattered_along_any_dimension(
    engine: JaxEngine, dimension: int, groups: Groups, shape: tuple[int, ...]
) -> None:
    part = list(shape)
    part[dimension] //= len(groups[0])
    before, after = (",".join(map(str, sizes)) for sizes in (shape, part))
    body = f"x = f32[{before}] parameter(0) ROOT r = f32[{after}] reduce-scatter(x), "
    body += f"replica_groups={listed(groups)}, dimensions={{{dimension}}}, to_apply=combine"
    executable = program(engine, body)
    assert hlo.shares_memory(executable.optimized_hlo)
    given = numbers("float32", shape)
    found = run(engine, executable, [[row] for row in given])
    for group in groups:
        total = functools.reduce(np.add, [given[member] for member in group])
        for replica, expected in zip(group, np.split(total, len(group), dimension), strict=True):
            assert found[replica][0].tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("groups", [((0, 1, 2, 3),), ((2, 0), (1, 3))], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_are_exchanged_along_any_dimension(
    engine: JaxEngine, dimension: int, groups: Groups, shape: tuple[int, ...]
) -> None:
    text = ",".join(map(str, shape))
    body = f"x = f32[{text}] parameter(0) ROOT r = f32[{text}] all-to-all(x), "
    body += f"replica_groups={listed(groups)}, dimensions={{{dimension}}}"
    executable = program(engine, body)
    assert hlo.shares_memory(executable.optimized_hlo)
    given = numbers("float32", shape)
    found = run(engine, executable, [[row] for row in given])
    for group in groups:
        for number, replica in enumerate(group):
            parts = [np.split(given[member], len(group), dimension)[number] for member in group]
            assert found[replica][0].tobytes() == np.concatenate(parts, dimension).tobytes()


@pytest.mark.parametrize("length", [1, 3, 400001])
def test_a_list_of_arrays_is_exchanged(engine: JaxEngine, length: int) -> None:
    shape = f"f32[{length}]"
    body = f"x = {shape} parameter(0) y = {shape} parameter(1) "
    body += f"ROOT r = ({shape}, {shape}) all-to-all(x, y), replica_groups={{{{0,3}},{{2,1}}}}"
    executable = program(engine, body)
    assert hlo.shares_memory(executable.optimized_hlo)
    first, second = numbers("float32", (length,), 1), numbers("float32", (length,), 2)
    found = run(engine, executable, list(zip(first, second, strict=True)))
    for one, other in ((0, 3), (2, 1)):
        assert [row.tobytes() for row in found[one]] == [first[one].tobytes(), first[other].tobytes()]
        assert [row.tobytes() for row in found[other]] == [second[one].tobytes(), second[other].tobytes()]


@pytest.mark.parametrize("dtype", COPIED)
@pytest.mark.parametrize("length", [5, 300001])
@pytest.mark.parametrize("groups", [((0, 1, 2, 3),), ((3, 0), (1, 2)), ((2, 1),)], ids=str)
def test_an_array_is_broadcast(engine: JaxEngine, dtype: str, length: int, groups: Groups) -> None:
    shape = f"{NAMES[dtype]}[{length}]"
    body = f"x = {shape} parameter(0) "
    body += f"ROOT r = {shape} collective-broadcast(x), replica_groups={listed(groups)}"
    executable = program(engine, body)
    assert hlo.shares_memory(executable.optimized_hlo)
    given = numbers(dtype, (length,))
    sources = {member: group[0] for group in groups for member in group}
    for replica, (found,) in enumerate(run(engine, executable, [[row] for row in given])):
        expected = given[sources[replica]] if replica in sources else np.zeros_like(found)
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", COPIED)
@pytest.mark.parametrize("length", [5, 300001])
@pytest.mark.parametrize(
    "pairs",
    [((0, 1), (1, 2), (2, 3), (3, 0)), ((0, 3), (1, 1)), ((1, 0), (2, 1), (3, 2)), ((3, 3),), ()],
    ids=str,
)
def test_arrays_are_permuted(engine: JaxEngine, dtype: str, length: int, pairs: Groups) -> None:
    shape = f"{NAMES[dtype]}[{length}]"
    body = f"x = {shape} parameter(0) "
    body += f"ROOT r = {shape} collective-permute(x), source_target_pairs={listed(pairs)}"
    executable = program(engine, body)
    given = numbers(dtype, (length,))
    sources = {target: source for source, target in pairs}
    for _ in range(2):
        for replica, (found,) in enumerate(run(engine, executable, [[row] for row in given])):
            expected = given[sources[replica]] if replica in sources else np.zeros_like(found)
            assert found.tobytes() == expected.tobytes()


GROUPINGS: list[Groups] = [
    ((0, 1, 2, 3),),
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((3, 0), (2, 1)),
    ((0,), (1,), (2,), (3,)),
]


@pytest.mark.parametrize(
    "what",
    [
        "collective-broadcast(x), replica_groups={{0,1,2,3}}",
        "collective-permute(x), source_target_pairs={{0,3}}",
    ],
    ids=["broadcast", "permute"],
)
def test_a_replica_passes_its_array_to_no_later_job(engine: JaxEngine, what: str) -> None:
    """It is not done before the others have the array."""
    executable = program(engine, f"x = f32[4] parameter(0) ROOT r = f32[4] {what}")
    argument, results = np.ones(4, np.float32), []
    for device in engine.devices:
        buffer = engine.from_host(device, ArrayType("float32", (4,)), argument.view(np.uint8).data)
        results.append(engine.to_host(engine.execute(executable, device, [buffer])[0]))
        if device.index == 0:
            with pytest.raises(TimeoutError):
                results[0].result(0.3)
    found = [np.frombuffer(result.result(TIMEOUT_S), np.float32)[0] for result in results]
    assert found == ([1, 1, 1, 1] if "broadcast" in what else [0, 0, 0, 1])


RING = ((0, 1), (1, 2), (2, 3), (3, 0))


def step(kind: str, groups: Groups, values: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Return what each replica has after a collective."""
    found = list(values)
    for group in groups:
        of_group = [values[member] for member in group]
        for number, member in enumerate(group):
            if kind == "all-reduce":
                found[member] = functools.reduce(np.add, of_group)
            elif kind == "all-to-all":
                found[member] = np.concatenate([np.split(value, len(group))[number] for value in of_group])
            else:
                found[member] = values[group[0]]
    if kind == "collective-permute":
        found = [values[source] for source, _ in (RING[-1], *RING[:-1])]
    return found


@pytest.mark.parametrize("length", [4, 300, 40000, 600000])
def test_replicas_that_change_their_groups_all_the_time_confuse_nothing(
    engine: JaxEngine, length: int
) -> None:
    """A replica that is done with one group goes on with another, while members of the first still read."""
    chance = random.Random(length)
    shape, expected = f"s32[{length}]", numbers("int32", (length,))
    given, lines = [[row] for row in expected], [f"x0 = {shape} parameter(0)"]
    for number in range(40):
        kind = chance.choice(["all-reduce", "all-to-all", "collective-broadcast", "collective-permute"])
        groups = chance.choice(GROUPINGS)
        more = {"all-reduce": ", to_apply=combine", "all-to-all": ", dimensions={0}"}.get(kind, "")
        among = f"replica_groups={listed(groups)}"
        if kind == "collective-permute":
            among = f"source_target_pairs={listed(RING)}"
        lines.append(f"x{number + 1} = {shape} {kind}(x{number}), {among}{more}")
        expected = step(kind, groups, expected)
    lines[-1] = f"ROOT {lines[-1]}"
    executable = program(engine, "\n".join(lines), "add", "s32")
    assert hlo.shares_memory(executable.optimized_hlo)
    for _ in range(3):
        for (found,), right in zip(run(engine, executable, given), expected, strict=True):
            assert found.tobytes() == right.tobytes()


def test_independent_collectives_keep_the_programs_order(engine: JaxEngine) -> None:
    count = 12
    parameters = " ".join(f"x{i} = f32[{100 * (i + 1)}] parameter({i})" for i in range(count))
    sums = "\n".join(
        f"sum{i} = f32[{100 * (i + 1)}] all-reduce(x{i}), channel_id={i + 1}, "
        "replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=combine"
        for i in reversed(range(count))
    )
    shapes = ", ".join(f"f32[{100 * (i + 1)}]" for i in range(count))
    root = f"ROOT r = ({shapes}) tuple({', '.join(f'sum{i}' for i in range(count))})"
    columns = [numbers("float32", (100 * (i + 1),), seed=i) for i in range(count)]
    executable = program(engine, f"{parameters} {sums} {root}")
    for _ in range(20):
        for found in run(engine, executable, list(zip(*columns, strict=True))):
            for mine, given in zip(found, columns, strict=True):
                assert mine.tobytes() == (((given[0] + given[1]) + given[2]) + given[3]).tobytes()


def test_what_the_library_does_not_have_stays_with_gloo(engine: JaxEngine) -> None:
    executable = program(engine, reducing("f16[4]"), "add", "f16")
    assert not hlo.shares_memory(executable.optimized_hlo)
    assert executable.native["collectives"] == ("all-reduce",)
    given = [[np.full(4, replica + 1, np.float16)] for replica in range(REPLICAS)]
    assert all(row.tolist() == [10.0] * 4 for (row,) in run(engine, executable, given))


def test_a_collective_in_a_loop_stays_with_gloo_and_others_of_the_program_do_not(engine: JaxEngine) -> None:
    text = f"""HloModule shared, replica_count={REPLICAS}
      combine {{ a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = f32[] add(a, b) }}
      step {{ s = (s32[], f32[4]) parameter(0)
        i = s32[] get-tuple-element(s), index=0
        x = f32[4] get-tuple-element(s), index=1
        one = s32[] constant(1)
        next = s32[] add(i, one)
        sum = f32[4] all-reduce(x), replica_groups={{}}, to_apply=combine
        ROOT r = (s32[], f32[4]) tuple(next, sum) }}
      goes_on {{ s = (s32[], f32[4]) parameter(0)
        i = s32[] get-tuple-element(s), index=0
        n = s32[] constant(3)
        ROOT r = pred[] compare(i, n), direction=LT }}
      ENTRY main {{ x = f32[4] parameter(0)
        zero = s32[] constant(0)
        start = (s32[], f32[4]) tuple(zero, x)
        end = (s32[], f32[4]) while(start), condition=goes_on, body=step
        last = f32[4] get-tuple-element(end), index=1
        beside = f32[4] all-reduce(x), replica_groups={{}}, to_apply=combine
        ROOT r = (f32[4], f32[4]) tuple(last, beside) }}"""
    module = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    executable = engine.compile(module, xla_client.CompileOptions().SerializeAsString())
    assert hlo.shares_memory(executable.optimized_hlo)
    assert hlo.groups_on_sockets(executable.optimized_hlo)
    given = [[np.ones(4, np.float32)] for _ in range(REPLICAS)]
    for _ in range(10):
        for last, beside in run(engine, executable, given):
            assert (last.tolist(), beside.tolist()) == ([64.0] * 4, [4.0] * 4)


WIDE = "s = f32[4] all-reduce(x), replica_groups={}, to_apply=combine"
NARROW = """h = f16[4] convert(x)
  g = f16[4] all-reduce(h), replica_groups=%s, to_apply=narrow
  w = f32[4] convert(g)"""


@pytest.mark.parametrize("groups", ["{}", "{{0},{1},{2},{3}}"], ids=["all", "alone"])
def test_replicas_may_meet_in_one_program_or_in_two(engine: JaxEngine, groups: str) -> None:
    """What only gloo does comes behind what shares memory, in the same program or in the next."""

    def compiled(name: str, body: str) -> Executable:
        text = f"""HloModule {name}, replica_count={REPLICAS}
          combine {{ a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = f32[] add(a, b) }}
          narrow {{ a = f16[] parameter(0) b = f16[] parameter(1) ROOT c = f16[] add(a, b) }}
          ENTRY main {{ x = f32[4] parameter(0) {body} }}"""
        module = hlo_module_from_text(text).as_serialized_hlo_module_proto()
        return engine.compile(module, xla_client.CompileOptions().SerializeAsString())

    narrow = NARROW % groups
    both = compiled("both", f"{WIDE}\n {narrow}\n ROOT r = (f32[4], f32[4]) tuple(s, w)")
    first = compiled("first", f"ROOT {WIDE}")
    second = compiled("second", f"{narrow}\n ROOT r = (f32[4]) tuple(w)")
    assert hlo.groups_on_sockets(both.optimized_hlo)
    assert hlo.shares_memory(both.optimized_hlo)
    assert not hlo.groups_on_sockets(first.optimized_hlo)
    argument, results = np.ones(4, np.float32), []
    for device in engine.devices:
        buffer = engine.from_host(device, ArrayType("float32", (4,)), argument.view(np.uint8).data)
        for executable in (both,) if device.index else (first, second):
            results += engine.execute(executable, device, [buffer])
    found = [np.frombuffer(engine.to_host(result).result(TIMEOUT_S), np.float32)[0] for result in results]
    assert found == [4, 4 if groups == "{}" else 1] * REPLICAS


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
def test_gloo_computes_the_same(engine: JaxEngine, on_gloo: JaxEngine, kind: str) -> None:
    sizes = {"all-reduce": 1024, "all-gather": 4096, "reduce-scatter": 256, "all-to-all": 1024}
    apply = ", to_apply=combine" if "reduce" in kind else ""
    along = "" if kind == "all-reduce" else ", dimensions={0}"
    body = f"x = f32[1024] parameter(0) ROOT r = f32[{sizes[kind]}] {kind}(x), replica_groups={{{{0,1,2,3}}}}"
    given = [[row] for row in numbers("float32", (1024,))]
    mine, theirs = (run(each, program(each, f"{body}{along}{apply}"), given) for each in (engine, on_gloo))
    for (ours,), (peers,) in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(ours, peers, rtol=1e-6, atol=1e-6)


def test_a_program_that_shares_memory_is_refused_where_there_is_none(
    engine: JaxEngine, on_gloo: JaxEngine
) -> None:
    data = engine.serialize(program(engine, reducing("f32[4]")))
    with pytest.raises(
        PjrtError, match="shared was compiled for replicas that share memory, and these do not"
    ):
        on_gloo.deserialize(data)


def test_only_a_process_that_knows_the_token_opens_a_file() -> None:
    file = SharedFile.make("test", 100)
    with closing(file):
        process, number, token = file.address
        found = SharedFile.open(file.address, 100)
        assert found is not None
        found.close()
        for other in [
            (process, number, "00" * 16),
            (process, number + 100, token),
            (2**22 + 1, number, token),
        ]:
            assert SharedFile.open(other, 100) is None


def test_processes_share_only_if_all_can(monkeypatch: pytest.MonkeyPatch) -> None:
    # The engine of other tests has this process's only job that shares memory.
    monkeypatch.setattr(native.LOCKED, "polyxla_is_joined", lambda: False)
    settings = [BridgeSettings(2, 2, process, "127.0.0.1:1", secret="of one job") for process in range(2)]
    first, second = map(SharedMemory, settings)
    try:
        assert first.decide([second.offer()]) == first.offer()
        process, number, _ = second.offer() or (0, 0, "")
        for stranger in [None, (process, number, "00" * 16), ("/etc", "passwd", "")]:
            assert first.decide([second.offer(), stranger]) is None  # type: ignore[list-item]
    finally:
        first.leave()
        second.leave()


PROGRAM = "shared_memory.py"
Started = Callable[..., AbstractContextManager[list["Popen[str]"]]]


def ready(process: Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "> ready\n", process.stderr.read() if process.stderr and not line else line


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_replica_whose_process_ended_is_named_at_once(started: Started, number: signal.Signals) -> None:
    with started(PROGRAM, "wait_for_the_last", replicas=3, processes=3) as processes:
        for process in processes:
            ready(process)
        gone = processes[2]
        gone.send_signal(number)
        began = time.monotonic()
        texts = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes[:2]]
    for replica, text in enumerate(texts):
        expected = (
            f"replica 2 (process {gone.pid}) ended while replica {replica} waited for it in an all-reduce"
        )
        assert expected in text
    assert time.monotonic() - began < TIMEOUT_S / 2


@pytest.mark.slow
def test_a_replica_that_leaves_is_named(started: Started) -> None:
    with started(PROGRAM, "leave_without_the_last", replicas=2, processes=2) as processes:
        text, _ = processes[0].communicate(timeout=TIMEOUT_S)
        assert "it waits for one that has returned (replica 0: in sum_of_all with all-reduce" in text
        assert f"replica 1 (process {processes[1].pid}) ended while replica 0 waited for it" in text
        assert processes[1].wait(TIMEOUT_S) == 0


def test_a_killed_job_leaves_no_memory(started: Started) -> None:
    def named() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir()}

    before = named()
    with started(PROGRAM, "wait_for_the_last", replicas=2, processes=2) as processes:
        for process in processes:
            ready(process)
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "memfd:polyxla-collectives" in maps
        during = named()
    assert {name for name in during | named() if "polyxla" in name} <= before


@pytest.mark.slow
def test_without_shared_memory_gloo_is_used(started: Started) -> None:
    with started(PROGRAM, "sum_up", replicas=2, processes=2, POLYXLA_SHARED_MEMORY="off") as processes:
        found = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    assert found == ["> False 3.0\n"] * 2


def test_waits_end_when_the_process_leaves(started: Started) -> None:
    with started(PROGRAM, "leave_while_waiting", replicas=2, processes=1) as (process,):
        text, err = process.communicate(timeout=TIMEOUT_S)
    assert "the engine was closed" in text, err
