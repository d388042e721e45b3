"""Convolutions of torch's library, and those that read their kernel backwards, compared with XLA's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from jaxlib import xla_client
from jaxlib._hlo import HloModule, hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.engine.expansions import convolution, inlining, torch_library
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo, rewrite

Computed = Callable[[bytes, list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]

Arrays = list[np.ndarray[Any, Any]]

PROGRAM = """HloModule gradient
ENTRY main {{ x = f32[3,4,8,9] parameter(0) w = f32[4,2,3,5] parameter(1)
  c = f32[3,2,8,9] convolution(x, w), window={{size=3x5 pad=1_1x2_2 {0}}}, dim_labels=bf01_io01->bf01
  ROOT r = (f32[3,2,8,9], f32[4,2,3,5]) tuple(c, w) }}"""

FORWARD = "bf01_oi01->bf01"
IN_LIBRARY = {
    "forward": ("2,3,9,8", "4,3,3,2", "2,4,9,9", "size=3x2 pad=1_1x1_1", FORWARD, ""),
    "with stride": ("2,3,9,8", "4,3,3,2", "2,4,4,3", "size=3x2 stride=2x3", FORWARD, ""),
    "dilated": ("1,3,9,8", "4,3,3,2", "1,4,5,5", "size=3x2 rhs_dilate=2x3", FORWARD, ""),
    "with groups": ("2,4,9,8", "6,2,3,2", "2,6,7,7", "size=3x2", FORWARD, "feature_group_count=2"),
    "of each feature": ("2,4,5,5", "8,1,3,3", "2,8,3,3", "size=3x3", FORWARD, "feature_group_count=4"),
    "padded on the left": ("2,3,8,8", "4,3,3,3", "2,4,4,4", "size=3x3 stride=2x2 pad=1_0x1_0", FORWARD, ""),
    "of another order": ("2,3,9,8", "3,2,3,4", "2,4,7,7", "size=3x2", "bf01_01io->bf01", ""),
    "of an image": (
        *("2,4,5,5", "4,3,3,3", "2,3,7,7"),
        *("size=3x3 pad=2_2x2_2 rhs_reversal=1x1", "bf01_io01->bf01", ""),
    ),
    "of an image, with stride": (
        *("2,4,3,2", "4,3,3,2", "2,3,8,6"),
        *("size=3x2 pad=1_2x1_1 lhs_dilate=3x4 rhs_reversal=1x1", "bf01_io01->bf01", ""),
    ),
    "of an image, dilated": (
        *("2,4,5,5", "4,3,3,3", "2,3,9,9"),
        *("size=3x3 pad=4_4x4_4 rhs_dilate=2x2 rhs_reversal=1x1", "bf01_io01->bf01", ""),
    ),
    "of an image, with groups": (
        *("2,6,5,5", "3,4,3,3", "2,4,7,7"),
        *("size=3x3 pad=2_2x2_2 rhs_reversal=1x1", "bf01_io01->bf01", "feature_group_count=2"),
    ),
    "transposed": (
        *("2,4,5,5", "3,3,4,3", "2,3,10,10"),
        *("size=3x3 pad=1_2x1_2 lhs_dilate=2x2", "bf01_01io->bf01", ""),
    ),
    "of a kernel": ("3,2,9,8", "3,4,7,7", "4,2,3,2", "size=7x7", "fb01_io01->fb01", ""),
    "of a kernel, with stride": (
        *("3,2,9,8", "3,4,4,3", "4,2,3,2"),
        *("size=4x3 rhs_dilate=2x3 pad=0_0x0_0", "fb01_io01->fb01", ""),
    ),
    "of a kernel, cropped": (
        *("3,2,8,8", "3,4,3,3", "4,2,3,3"),
        *("size=3x3 rhs_dilate=2x2 pad=0_-1x0_-1", "fb01_io01->fb01", ""),
    ),
    "of a kernel, dilated": (
        *("3,2,9,8", "3,4,5,5", "4,2,3,2"),
        *("size=5x5 stride=2x3", "fb01_io01->fb01", ""),
    ),
    "of a kernel, in torch_xla's order": (
        *("3,2,9,8", "3,4,7,7", "3,2,2,4"),
        *("size=7x7", "fb01_io01->01bf", ""),
    ),
    "of a kernel, with groups": (
        *("3,4,9,8", "3,6,7,7", "6,2,3,2"),
        *("size=7x7", "fb01_io01->fb01", "batch_group_count=2"),
    ),
    "of a line": ("2,3,9", "4,3,3", "2,4,9", "size=3 pad=1_1", "bf0_oi0->bf0", ""),
    "of a volume": ("2,3,5,4,4", "4,3,3,2,2", "2,4,3,3,3", "size=3x2x2", "bf012_oi012->bf012", ""),
}
"""The dimensions of both operands and the result, the window, the labels, and the groups."""


def program_of(
    first: str, second: str, result: str, window: str, labels: str, groups: str = "", dtype: str = "f32"
) -> bytes:
    more = f", {groups}" if groups else ""
    text = f"""HloModule convolutions
    ENTRY main {{ x = {dtype}[{first}] parameter(0) w = {dtype}[{second}] parameter(1)
      ROOT c = {dtype}[{result}] convolution(x, w), window={{{window}}}, dim_labels={labels}{more} }}"""
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


def numbers_for(data: bytes) -> Arrays:
    numbers = np.random.default_rng(0)
    return [numbers.normal(size=dims).astype(np.float32) for _, dims in hlo.parameters(data)]


def in_library(data: bytes) -> bytes:
    return inlining.replace(data, convolution.choose)


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "LEAST_WORK", 0)
    monkeypatch.setattr(convolution, "_LEAST_FEATURES", 0)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("form", IN_LIBRARY)
def test_the_library_computes_what_xla_does(form: str, computed: Computed) -> None:
    data = program_of(*IN_LIBRARY[form])
    replaced = in_library(data)
    assert hlo.called_targets(replaced) == {convolution.TARGET}
    arguments = numbers_for(data)
    (expected,), (found,) = computed(data, arguments), computed(replaced, arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("reversed_by", ["reverse", "the window"])
def test_a_kernel_that_is_reversed_is_an_images_gradient(reversed_by: str, computed: Computed) -> None:
    how = " rhs_reversal=1x1" if reversed_by == "the window" else ""
    kernel = "w" if how else "v"
    text = f"""HloModule reversed
    ENTRY main {{ x = f32[2,4,5,5] parameter(0) w = f32[4,3,3,3] parameter(1)
      v = f32[4,3,3,3] reverse(w), dimensions={{2,3}}
      ROOT c = f32[2,3,7,7] convolution(x, {kernel}), window={{size=3x3 pad=2_2x2_2{how}}},
        dim_labels=bf01_io01->bf01 }}"""
    data = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    replaced = in_library(data)
    (call,) = (each for each in hlo.instructions(replaced) if each.custom_call_target == convolution.TARGET)
    assert "kind = 1" in call.backend_config.decode()
    arguments = numbers_for(data)
    (expected,), (found,) = computed(data, arguments), computed(replaced, arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(
    "form",
    [
        ("2,3,8,8", "4,3,3,3", "2,4,8,8", "size=3x3 pad=0_2x0_2", FORWARD),
        ("2,8,8,3", "3,3,3,4", "2,6,6,4", "size=3x3", "b01f_01io->b01f"),
        ("2,3,8,8", "4,3,3,3", "2,4,8,6", "size=3x3 stride=2x2 lhs_dilate=2x2 pad=1_1x0_-1", FORWARD),
        ("2,3,8,8", "4,3,3,3", "2,4,6,6", "size=3x3 rhs_reversal=1x0", FORWARD),
        ("2,3,8,8", "4,3,3,3", "2,4,4,4", "size=3x3 pad=-1_-1x-1_-1", FORWARD),
        ("2,3", "4,3", "2,4", "", "bf_oi->bf"),
        ("2,3,3,3,3,3", "4,3,2,2,2,2", "2,4,2,2,2,2", "size=2x2x2x2", "bf0123_oi0123->bf0123"),
        ("0,3,8,8", "4,3,3,3", "0,4,6,6", "size=3x3", FORWARD),
    ],
)
def test_what_torch_has_not_is_left_to_xla(form: tuple[str, ...]) -> None:
    data = program_of(*form)
    assert in_library(data) is data


def test_float64_is_left_to_xla() -> None:
    data = program_of("8,64,32,32", "64,64,3,3", "8,64,30,30", "size=3x3", FORWARD, dtype="f64")
    assert in_library(data) is data


SMALL = ("2,3,8,8", "4,3,3,3", "2,4,6,6", "size=3x3", FORWARD)


@pytest.mark.parametrize(
    ("form", "is_called"),
    [
        (SMALL, False),
        (("8,16,32,32", "32,16,3,3", "8,32,30,30", "size=3x3", FORWARD), True),
        # Torch's are always faster with groups.
        (("1,4,5,5", "4,1,3,3", "1,4,3,3", "size=3x3", FORWARD, "feature_group_count=4"), True),
        (
            ("16,64,14,14", "64,128,1,1", "16,128,27,27", "size=1x1 lhs_dilate=2x2", "bf01_io01->bf01"),
            False,
        ),
    ],
)
def test_the_library_computes_what_it_is_faster_at(form: tuple[str, ...], is_called: bool) -> None:
    data = program_of(*form)
    assert (in_library(data) is not data) is is_called


@pytest.mark.parametrize("has_avx512", [False, True])
def test_the_gradient_of_a_grey_images_kernel_depends_on_the_processor(
    has_avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "_has_avx512", lambda: has_avx512)
    data = program_of("64,1,28,28", "64,32,26,26", "32,1,3,3", "size=26x26", "fb01_io01->fb01")
    assert (in_library(data) is not data) is has_avx512


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("form", ["forward", "of an image", "of a kernel"])
def test_narrow_numbers_are_added_in_float32(form: str, computed: Computed) -> None:
    wide, data = (program_of(*IN_LIBRARY[form], dtype=dtype) for dtype in ("f32", "bf16"))
    narrow = np.dtype(ml_dtypes.bfloat16)
    arguments = [array.astype(narrow) for array in numbers_for(wide)]
    (exact,) = computed(wide, [array.astype(np.float32) for array in arguments])
    (found,) = computed(in_library(data), arguments)
    assert found.dtype == narrow
    # Half of the distance between two numbers of 8 bits.
    np.testing.assert_allclose(found.astype(np.float32), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    "form",
    [
        ("8,16,40,40", "32,16,3,3", "8,32,38,38", "size=3x3", FORWARD),
        # A batch of one is cut along the features.
        ("1,16,80,80", "32,16,3,3", "1,32,78,78", "size=3x3", FORWARD),
        (
            *("1,32,78,78", "32,16,3,3", "1,16,80,80"),
            *("size=3x3 pad=2_2x2_2 rhs_reversal=1x1", "bf01_io01->bf01"),
        ),
        ("8,16,40,40", "8,32,38,38", "32,16,3,3", "size=38x38", "fb01_io01->fb01"),
        ("1,16,80,80", "1,32,78,78", "32,16,3,3", "size=78x78", "fb01_io01->fb01"),
        # 3 samples for 2 threads.
        ("3,16,64,64", "3,32,62,62", "32,16,3,3", "size=62x62", "fb01_io01->fb01"),
    ],
)
def test_several_threads_compute_one_convolution(form: tuple[str, ...], computed: Computed) -> None:
    data = program_of(*form)
    replaced = in_library(data)
    assert replaced is not data
    arguments = numbers_for(data)
    (expected,), (found,), (again,) = (computed(each, arguments) for each in (data, replaced, replaced))
    scale = math.sqrt(float(np.mean(np.square(expected))))
    np.testing.assert_allclose(found / scale, expected / scale, rtol=1e-5, atol=1e-5)
    # Equal to the bit in every run.
    np.testing.assert_array_equal(again, found)


@pytest.mark.usefixtures("any_size")
def test_a_loop_calls_the_library(computed: Computed) -> None:
    image, kernel = "f32[2,8,40,40]", "f32[8,8,3,3]"
    state = f"(s32[], {image}, {kernel})"
    text = f"""HloModule loop
    body {{ s = {state} parameter(0) i = s32[] get-tuple-element(s), index=0
      x = {image} get-tuple-element(s), index=1 w = {kernel} get-tuple-element(s), index=2
      o = s32[] constant(1) n = s32[] add(i, o)
      c = {image} convolution(x, w), window={{size=3x3 pad=1_1x1_1}}, dim_labels={FORWARD}
      ROOT t = {state} tuple(n, c, w) }}
    condition {{ s = {state} parameter(0) i = s32[] get-tuple-element(s), index=0
      e = s32[] constant(3) ROOT l = pred[] compare(i, e), direction=LT }}
    ENTRY main {{ x = {image} parameter(0) w = {kernel} parameter(1) z = s32[] constant(0)
      s = {state} tuple(z, x, w) l = {state} while(s), condition=condition, body=body
      ROOT r = {image} get-tuple-element(l), index=1 }}"""
    data = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    replaced = in_library(data)
    assert hlo.called_targets(replaced) == {convolution.TARGET}
    arguments = numbers_for(data)
    (expected,), (found,) = computed(data, arguments), computed(replaced, arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * float(np.abs(expected).max()))


BIG = program_of("8,16,32,32", "32,16,3,3", "8,32,30,30", "size=3x3", FORWARD)


@pytest.fixture
def engine() -> Iterator[JaxEngine]:
    opened = JaxEngine(BridgeSettings())
    yield opened
    opened.close()


def options() -> bytes:
    chosen = xla_client.CompileOptions()
    data: bytes = chosen.SerializeAsString()
    return data


def test_an_engine_calls_the_library_and_stores_the_call(engine: JaxEngine) -> None:
    executable = engine.compile(BIG, options())
    assert hlo.called_targets(executable.optimized_hlo) == {convolution.TARGET}
    loaded = engine.deserialize(engine.serialize(executable))
    assert hlo.called_targets(loaded.optimized_hlo) == {convolution.TARGET}


def test_without_torchs_library_xla_computes(engine: JaxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = engine.serialize(engine.compile(BIG, options()))
    monkeypatch.setattr(torch_library, "is_open", lambda: False)
    assert not hlo.called_targets(engine.compile(BIG, options()).optimized_hlo)
    with pytest.raises(PjrtError, match="calls torch's library, and this process cannot open it"):
        engine.deserialize(stored)


def test_the_user_chooses_xlas() -> None:
    engine = JaxEngine(BridgeSettings(has_torch_kernels=False))
    try:
        executable = engine.compile(BIG, options())
    finally:
        engine.close()
    assert not hlo.called_targets(executable.optimized_hlo)


def module(window: str) -> bytes:
    data: bytes = hlo_module_from_text(PROGRAM.format(window)).as_serialized_hlo_module_proto()
    return data


@pytest.mark.parametrize("reversal", ["1x1", "1x0", "0x1"])
def test_the_kernel_is_reversed_before_the_convolution(reversal: str, computed: Computed) -> None:
    data = module(f"rhs_reversal={reversal}")
    rewritten = rewrite.for_jaxlib(data, 1)
    text = HloModule.from_serialized_hlo_module_proto(rewritten).to_string()
    assert "rhs_reversal" not in text
    assert text.count(" reverse(") == 1

    for array, other in zip(
        computed(data, numbers_for(data)), computed(rewritten, numbers_for(data)), strict=True
    ):
        np.testing.assert_allclose(other, array, rtol=1e-5, atol=1e-5)


def test_another_convolution_stays_as_it_is() -> None:
    data = module("")
    assert rewrite.for_jaxlib(data, 1) is data
