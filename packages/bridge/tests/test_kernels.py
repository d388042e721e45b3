"""Kernels for TPU cores, and the programs that they carry."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jaxlib import xla_client

from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.libtpu import pallas
from polyxla_bridge.programs import compile_request, hlo, kernels
from polyxla_testing.engine_conformance import download, module, upload

LOWERING = "jax._src.pallas.mosaic.pallas_call_registration"
INT32 = 4
"""Its number in XLA. Source: PrimitiveType in xla/xla_data.proto."""
ROWS = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)


@pytest.fixture
def carrying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels carry programs during a test."""
    lowering = importlib.import_module(LOWERING)
    monkeypatch.setattr(lowering, "pallas_call_tpu_lowering_rule", lowering.pallas_call_tpu_lowering_rule)
    rules = lowering.pallas_core._backend_lowering_rules
    monkeypatch.setitem(rules, lowering.tpu_core.CompilerParams, rules[lowering.tpu_core.CompilerParams])
    pallas.watch()


@pytest.fixture
def engine() -> Iterator[JaxEngine]:
    engine = JaxEngine(BridgeSettings())
    yield engine
    engine.close()


def program(function: Any, *examples: Any) -> bytes:
    """Return a serialised HloModuleProto of a function, as lowered for a TPU."""

    # jax keeps what it has lowered of a function, and the next test may lower it otherwise.
    def new(*arguments: Any) -> Any:
        return function(*arguments)

    exported = jax.export.export(jax.jit(new), platforms=["tpu"])(*examples)
    return compile_request.to_hlo(exported.mlir_module_serialized)


def computed(engine: JaxEngine, data: bytes, *arguments: Any) -> list[Any]:
    executable = engine.compile(data, xla_client.CompileOptions().SerializeAsString())
    buffers = [upload(engine, argument) for argument in arguments]
    return [download(engine, result) for result in engine.execute(executable, engine.devices[0], buffers)]


def plus_one(rows: Any) -> Any:
    def kernel(rows_ref: Any, result_ref: Any) -> None:
        result_ref[...] = rows_ref[...] + 1

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype))(rows)


def chosen(rows: Any, mask: Any) -> tuple[Any, Any]:
    """Return rows where a mask holds, and where it does not."""

    def kernel(rows_ref: Any, mask_ref: Any, result_ref: Any, other_ref: Any) -> None:
        result_ref[...] = jnp.where(mask_ref[...], rows_ref[...], 0.0)
        other_ref[...] = ~mask_ref[...]

    shapes = (
        jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        jax.ShapeDtypeStruct(mask.shape, mask.dtype),
    )
    results = pl.pallas_call(kernel, out_shape=shapes)(rows, mask)
    return results[0] * 2, results[1]


def test_a_kernel_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(PjrtError, match=r"jit_new has the tpu_custom_call .*enable_flash_sdp\(False\)"):
        kernels.check(program(plus_one, ROWS))
    quoted = module("HloModule tpu_custom_call\nENTRY main { ROOT x = f32[4] parameter(0) }")
    kernels.check(quoted)


@pytest.mark.usefixtures("carrying")
def test_a_kernel_computes_what_it_carries(engine: JaxEngine) -> None:
    (result,) = computed(engine, program(plus_one, ROWS), ROWS)
    assert np.array_equal(result, ROWS + 1)


@pytest.mark.usefixtures("carrying")
def test_a_kernel_takes_and_returns_booleans_and_several_arrays(engine: JaxEngine) -> None:
    mask = ROWS % 3 == 0
    result, other = computed(engine, program(chosen, ROWS, mask), ROWS, mask)
    assert np.array_equal(result, np.where(mask, ROWS, 0) * 2)
    assert np.array_equal(other, ~mask)


@pytest.mark.usefixtures("carrying")
def test_a_kernel_has_a_tpus_products() -> None:
    def product(rows: Any) -> Any:
        def kernel(rows_ref: Any, result_ref: Any) -> None:
            result_ref[...] = jnp.dot(rows_ref[...], rows_ref[...].T)

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 8), rows.dtype))(rows)

    rows = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    rounded = rows.astype(ml_dtypes.bfloat16).astype(np.float32)
    engine = JaxEngine(BridgeSettings(has_tpu_numerics=True))
    (result,) = computed(engine, program(product, rows), rows)
    engine.close()
    # The order of the sums is the processor's.
    np.testing.assert_allclose(result, rounded @ rounded.T, rtol=1e-5, atol=1e-5)
    assert not np.allclose(result, rows @ rows.T, rtol=1e-4)


def first_columns(rows: Any, wide: Any) -> Any:
    """Add the first columns of an array that has more."""

    def kernel(rows_ref: Any, wide_ref: Any, result_ref: Any) -> None:
        result_ref[...] = rows_ref[...] + wide_ref[...]

    spec = pl.BlockSpec((8, 128), lambda step: (0, step))
    call = pl.pallas_call(
        kernel,
        grid=(1,),
        in_specs=[spec, spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
    )
    return call(rows, wide)


def narrowed(program: bytes, **changes: Any) -> bytes:
    """Return a program of `first_columns` whose second argument has only the first columns."""
    parsed = hlo.parse_module(program)
    shapes = [instruction.shape for part in parsed.computations for instruction in part.instructions]
    shapes += [shape for part in parsed.computations for shape in part.program_shape.parameters]
    for shape in (*shapes, *parsed.host_program_shape.parameters):
        if list(shape.dimensions) == [8, 256]:
            shape.dimensions[:] = changes.get("dimensions", [8, 128])
            shape.element_type = changes.get("element_type", shape.element_type)
    return parsed.SerializeToString()


@pytest.mark.usefixtures("carrying")
def test_a_kernel_finds_its_blocks_in_arrays_of_other_sizes(engine: JaxEngine) -> None:
    traced = program(first_columns, ROWS, np.tile(ROWS, 2))
    (result,) = computed(engine, narrowed(traced), ROWS, ROWS)
    assert np.array_equal(result, 2 * ROWS)
    (result,) = computed(engine, narrowed(traced, dimensions=[8, 512]), ROWS, np.tile(ROWS, 4))
    assert np.array_equal(result, 2 * ROWS)


@pytest.mark.usefixtures("carrying")
def test_an_operand_of_another_dtype_is_refused(engine: JaxEngine) -> None:
    traced = program(first_columns, ROWS, np.tile(ROWS, 2))
    other = narrowed(traced, element_type=INT32)
    with pytest.raises(
        PjrtError, match=r"operand 1 of .* \(tpu_custom_call\) is int32\[8, 128\], and was float32"
    ):
        computed(engine, other, ROWS, ROWS.astype(np.int32))


def test_what_jax_lacks_is_part_of_the_refusal() -> None:
    parsed = hlo.parse_module(program(plus_one, ROWS))
    for instruction in parsed.computations[-1].instructions:
        if kernels.is_kernel(instruction):
            config = instruction.backend_config.decode()
            instruction.backend_config = kernels.with_reason(config, "JAX has no such thing").encode()
    with pytest.raises(PjrtError, match=r"where a TPU is emulated; JAX has no such thing\. Use torch's"):
        kernels.check(parsed.SerializeToString())


@pytest.mark.usefixtures("carrying")
def test_a_recorded_kernel_is_as_jax_wrote_it() -> None:
    with_programs = program(plus_one, ROWS)
    assert b"polyxla" not in kernels.as_written(with_programs)
    assert b"polyxla_program" in with_programs
    without = kernels.as_written(with_programs)
    with pytest.raises(PjrtError, match="a kernel for TPU cores"):
        kernels.check(without)
    quoted = module("HloModule plain\nENTRY main { ROOT x = f32[4] parameter(0) }")
    assert kernels.as_written(quoted) is quoted
