"""The engine without torch_xla, with programs made by jax."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla.plugin import free_ports
from polyxla_bridge.engine.engine import Buffer
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.programs import compile_once
from polyxla_bridge.programs.executable import ArrayType, Executable

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def engine() -> Iterator[JaxEngine]:
    engine = JaxEngine(BridgeSettings())
    yield engine
    engine.close()


@pytest.fixture(params=[2, 4])
def replicas(request: pytest.FixtureRequest) -> Iterator[JaxEngine]:
    engine = JaxEngine(BridgeSettings(request.param, 1, 0, f"127.0.0.1:{free_ports(1)[0]}"))
    yield engine
    engine.close()


def program(function: Callable[..., Any], *examples: Any) -> bytes:
    """Return a serialised HloModuleProto of a jax function."""
    lowered = jax.jit(function).lower(*examples)
    module = lowered.compiler_ir("hlo")
    assert module is not None
    data: bytes = module.as_serialized_hlo_module_proto()
    return data


def compiled(engine: JaxEngine, function: Callable[..., Any], *examples: Any) -> Executable:
    return engine.compile(program(function, *examples), xla_client.CompileOptions().SerializeAsString())


def upload(engine: JaxEngine, host: Any, index: int = 0) -> Buffer:
    host = np.asarray(host, order="C")
    type_ = ArrayType(host.dtype.name, host.shape)
    return engine.from_host(engine.devices[index], type_, memoryview(host.reshape(-1).view(np.uint8)))


def download(engine: JaxEngine, buffer: Buffer) -> Any:
    data = engine.to_host(buffer).result(TIMEOUT_S)
    dtype = getattr(ml_dtypes, buffer.type.dtype, None) or buffer.type.dtype
    return np.frombuffer(data, dtype).reshape(buffer.type.dims)


def aligned(count: int, place: int = 0) -> Any:
    """Return so many floats, `place` bytes behind an address that is a multiple of 64."""
    memory = np.empty(4 * count + 128, np.uint8)
    start = -memory.ctypes.data % 64 + place
    return memory[start : start + 4 * count].view(np.float32)


@pytest.mark.parametrize(("place", "is_shared"), [(0, True), (4, False)])
def test_an_array_is_in_the_memory_that_was_handed_over_if_that_is_aligned(
    engine: JaxEngine, place: int, is_shared: bool
) -> None:
    host = aligned(1024, place)
    buffer = upload(engine, host)
    assert (engine.address(buffer) == host.ctypes.data) is is_shared


def test_a_program_that_gets_an_uploaded_array_does_not_write_to_its_memory(engine: JaxEngine) -> None:
    host = aligned(1024)
    host[:] = 1
    taking = """HloModule taking, input_output_alias={ {}: (0, {}, must-alias) }
        ENTRY main { x = f32[1024] parameter(0) ROOT s = f32[1024] add(x, x) }"""
    module = hlo_module_from_text(taking).as_serialized_hlo_module_proto()
    executable = engine.compile(module, xla_client.CompileOptions().SerializeAsString())
    (result,) = engine.execute(executable, engine.devices[0], [upload(engine, host)])
    assert download(engine, result).max() == 2
    assert host.max() == 1


def test_the_memory_of_a_deleted_array_is_let_go(engine: JaxEngine) -> None:
    host = aligned(1024)
    freed = threading.Event()
    weakref.finalize(host.base, freed.set)
    buffer = upload(engine, host)
    del host
    assert not freed.is_set()
    engine.delete(buffer)
    assert freed.wait(TIMEOUT_S)


def test_the_same_program_is_compiled_once(engine: JaxEngine) -> None:
    code = program(lambda a: a * 3, np.float32(0))
    options = xla_client.CompileOptions().SerializeAsString()
    before, found = engine.compiles, list[Executable]()
    threads = [threading.Thread(target=lambda: found.append(engine.compile(code, options))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert (len(found), len({id(executable) for executable in found})) == (4, 1)
    assert engine.compiles == before + 1


@pytest.mark.parametrize(("combine", "expected"), [("and", 8), ("or", 15), ("xor", 7)])
@pytest.mark.parametrize("groups", ["{}", "{{0,1}}", "{{1,0}}"])
def test_integers_are_combined_bit_by_bit(combine: str, expected: int, groups: str) -> None:
    text = f"""HloModule bits, replica_count=2
both {{ a = u8[] parameter(0) b = u8[] parameter(1) ROOT s = u8[] {combine}(a, b) }}
ENTRY main {{ x = u8[2,3] parameter(0) y = u8[] parameter(1)
  one = u8[2,3] all-reduce(x), replica_groups={groups}, to_apply=both
  two = (u8[2,3], u8[]) all-reduce(one, y), replica_groups={groups}, to_apply=both
  z = u8[] get-tuple-element(two), index=1
  ROOT t = (u8[2,3], u8[]) tuple(one, z) }}"""
    engine = JaxEngine(BridgeSettings(2, 1, 0, f"127.0.0.1:{free_ports(1)[0]}"))
    module = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    executable = engine.compile(module, xla_client.CompileOptions().SerializeAsString())
    inputs = [np.full((2, 3), value, np.uint8) for value in (12, 11)]
    inputs[1][0, 2] = 0
    results = [
        engine.execute(
            executable, device, [upload(engine, host, device.index), upload(engine, host[1, 1], device.index)]
        )
        for device, host in zip(engine.devices, inputs, strict=True)
    ]
    for x, y in results:
        assert download(engine, y) == expected
        assert download(engine, x)[1].tolist() == [expected] * 3
        assert download(engine, x)[0, 2] == (0 if combine == "and" else 12)
    engine.close()


def test_operands_of_one_all_reduce_are_summed_separately(replicas: JaxEngine) -> None:
    count = len(replicas.devices)
    text = f"""HloModule several, replica_count={count}
add {{ a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }}
ENTRY main {{ x = f32[2,3] parameter(0) y = f32[] parameter(1) z = f32[300000] parameter(2)
  w = f32[2] parameter(3)
  ROOT r = (f32[2,3], f32[], f32[300000], f32[2]) all-reduce(x, y, z, w), replica_groups={{}},
    to_apply=add }}"""
    module = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    executable = replicas.compile(module, xla_client.CompileOptions().SerializeAsString())
    shapes: list[tuple[int, ...]] = [(2, 3), (), (300000,), (2,)]
    hosts = [np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + 1 for shape in shapes]
    results = [
        replicas.execute(executable, device, [upload(replicas, host, device.index) for host in hosts])
        for device in replicas.devices
    ]
    for result in results:
        for buffer, host in zip(result, hosts, strict=True):
            np.testing.assert_array_equal(download(replicas, buffer), host * count)


@pytest.mark.parametrize("is_in_file", [False, True])
def test_an_xla_flag_of_the_user_takes_precedence(
    engine: JaxEngine, tmp_path: Path, is_in_file: bool
) -> None:
    example = np.ones((64, 64), np.float32)
    flag = "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT"
    file = tmp_path / "flags"
    file.write_text(flag)
    other = JaxEngine(BridgeSettings(xla_flags=str(file) if is_in_file else flag))
    hlos = [compiled(each, lambda a: a @ a, example).optimized_hlo for each in (engine, other)]
    assert [b"ynn" in code for code in hlos] == [False, True]
    other.close()


@pytest.fixture
def three() -> Iterator[JaxEngine]:
    engine = JaxEngine(BridgeSettings(3, 1, 0, f"127.0.0.1:{free_ports(1)[0]}", secret="of one job"))
    yield engine
    engine.close()


def test_a_replica_waits_until_all_of_its_group_have_arrived(three: JaxEngine) -> None:
    """And believes no stranger that another has."""
    coordinator, link, group = three._coordinator, three._clients.link, frozenset((0, 2))
    assert coordinator is not None
    assert link is not None
    coordinator.arrive(group, 0)
    coordinator.arrive(frozenset((1, 2)), 2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(coordinator.await_arrivals, group)
        place = compile_once._place(group)
        link.key_value_set_bytes(f"{place}2", b"{}", allow_overwrite=True)
        with pytest.raises(TimeoutError):
            waits.result(0.5)
        coordinator.arrive(group, 2)
        waits.result(TIMEOUT_S)


def pairs(*groups: str) -> bytes:
    """Return a program that sums a number over one group after the other."""
    lines = (
        f"x{number + 1} = f32[] all-reduce(x{number}), replica_groups={{{group}}}, to_apply=add"
        for number, group in enumerate(groups)
    )
    text = f"""HloModule pairs, replica_count=3
    add {{ a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }}
    ENTRY main {{ x0 = f32[] parameter(0)
      {" ".join(lines)}
      ROOT y = f32[] negate(x{len(groups)}) }}"""
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


def test_a_group_that_a_replica_meets_later_in_a_program_is_not_waited_for_before(three: JaxEngine) -> None:
    """Replica 2 joins it only after replica 0, which first meets replica 1."""
    options = xla_client.CompileOptions().SerializeAsString()
    of_01, of_12, of_02 = "{0,1},{2}", "{1,2},{0}", "{0,2},{1}"
    programs = {
        0: [pairs(of_01), pairs(of_02)],
        1: [pairs(of_01, of_12)],
        2: [pairs(of_02), pairs(of_12)],
    }
    results = []
    for index, device in enumerate(three.devices):
        for module in programs[index]:
            data = np.array([1], np.float32).view(np.uint8).data
            argument = three.from_host(device, ArrayType("float32", ()), data)
            results += three.execute(three.compile(module, options), device, [argument])
    hosts = [three.to_host(result).result(TIMEOUT_S) for result in results]
    assert [np.frombuffer(host, np.float32)[0] for host in hosts] == [-2, -2, -3, -2, -3]
