"""Convolutions that read their kernel backwards, compared with what XLA computes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jaxlib import _jax, xla_client
from jaxlib._hlo import HloModule, hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.programs import rewrite

PROGRAM = """HloModule gradient
ENTRY main {{ x = f32[3,4,8,9] parameter(0) w = f32[4,2,3,5] parameter(1)
  c = f32[3,2,8,9] convolution(x, w), window={{size=3x5 pad=1_1x2_2 {0}}}, dim_labels=bf01_io01->bf01
  ROOT r = (f32[3,2,8,9], f32[4,2,3,5]) tuple(c, w) }}"""


def computed(data: bytes, arguments: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    (device,) = jax.devices("cpu")[:1]
    program = device.client.compile_and_load(
        _jax.mlir.hlo_to_stablehlo(data), _jax.DeviceList((device,)), xla_client.CompileOptions()
    )
    results = program.execute_sharded([jax.device_put(argument) for argument in arguments])
    return [np.asarray(parts[0]) for parts in results.disassemble_into_single_device_arrays()]


def module(window: str) -> bytes:
    data: bytes = hlo_module_from_text(PROGRAM.format(window)).as_serialized_hlo_module_proto()
    return data


@pytest.mark.parametrize("reversal", ["1x1", "1x0", "0x1"])
def test_the_kernel_is_reversed_before_the_convolution(reversal: str) -> None:
    data = module(f"rhs_reversal={reversal}")
    rewritten = rewrite.for_jaxlib(data, 1)
    text = HloModule.from_serialized_hlo_module_proto(rewritten).to_string()
    assert "rhs_reversal" not in text
    assert text.count(" reverse(") == 1

    numbers = np.random.default_rng(0)
    arguments = [numbers.random(dims).astype(np.float32) for dims in ((3, 4, 8, 9), (4, 2, 3, 5))]
    for array, other in zip(computed(data, arguments), computed(rewritten, arguments), strict=True):
        np.testing.assert_allclose(other, array, rtol=1e-5)


def test_another_convolution_stays_as_it_is() -> None:
    data = module("")
    assert rewrite.for_jaxlib(data, 1) is data
