"""Sums of narrow numbers are rounded once, as PyTorch rounds them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla_bridge.engine.expansions import cpu, inlining
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.programs.executable import ArrayType

TIMEOUT_S = 60


def program(dtype: str, step: str) -> bytes:
    text = f"""HloModule reduces
    step {{ a = {dtype}[] parameter(0) b = {dtype}[] parameter(1) ROOT c = {dtype}[] {step}(a, b) }}
    ENTRY main {{ x = {dtype}[4,300] parameter(0) z = {dtype}[] constant(0)
      ROOT r = {dtype}[4] reduce(x, z), dimensions={{1}}, to_apply=step }}"""
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_sum_is_rounded_once(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
    numbers = np.random.default_rng(0).uniform(0, 30, (4, 300)).astype(dtype)
    engine = JaxEngine(BridgeSettings())
    options = xla_client.CompileOptions().SerializeAsString()
    executable = engine.compile(program({"bfloat16": "bf16", "float16": "f16"}[name], "add"), options)
    argument = engine.from_host(
        engine.devices[0], ArrayType(name, (4, 300)), memoryview(numbers.view(np.uint8).data).cast("B")
    )
    (result,) = engine.execute(executable, engine.devices[0], [argument])
    found = np.frombuffer(engine.to_host(result).result(TIMEOUT_S), np.uint8).view(dtype)
    engine.close()
    assert found.tolist() == numbers.astype(np.float32).sum(axis=1).astype(dtype).tolist()


@pytest.mark.parametrize(("dtype", "step"), [("f32", "add"), ("bf16", "maximum")])
def test_other_reductions_stay_as_they_are(dtype: str, step: str) -> None:
    data = program(dtype, step)
    assert inlining.replace(data, cpu.choose_narrow_sum) is data
