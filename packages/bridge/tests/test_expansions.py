"""Instructions of torch_xla and TorchTPU that XLA's CPU compiler refuses, compared with torch and numpy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from jaxlib._hlo import HloModule  # type: ignore[import-not-found]

from polyxla_bridge.engine.expansions import tpu
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.programs import rewrite
from polyxla_testing.engine_conformance import compiled, download, module, upload

SLICES = """HloModule slices
ENTRY main { x = s64[6,3] parameter(0) i = s64[2] parameter(1) u = s64[1,2] parameter(2)
  y = s64[1,2] dynamic-slice(x, i), dynamic_slice_sizes={1,2}
  z = s64[6,3] dynamic-update-slice(x, u, i) ROOT t = (s64[1,2], s64[6,3]) tuple(y, z) }"""


@pytest.fixture(scope="module")
def engine() -> Iterator[JaxEngine]:
    engine = JaxEngine(BridgeSettings())
    yield engine
    engine.close()


def computed(engine: JaxEngine, text: str, *arguments: Any) -> list[Any]:
    buffers = [upload(engine, argument) for argument in arguments]
    results = engine.execute(compiled(engine, text), engine.devices[0], buffers)
    return [download(engine, result) for result in results]


def test_a_dynamic_slice_takes_its_indices_in_one_vector(engine: JaxEngine) -> None:
    numbers, update = np.arange(18).reshape(6, 3), np.array([[-1, -2]])
    part, whole = computed(engine, SLICES, numbers, np.array([4, 1]), update)
    assert part.tolist() == [[13, 14]]
    numbers[4, 1:] = update
    assert whole.tolist() == numbers.tolist()


def test_a_partitioned_program_gets_the_indices_one_by_one() -> None:
    rewritten = rewrite.for_jaxlib(module(SLICES), 1, 2)
    text = HloModule.from_serialized_hlo_module_proto(rewritten).to_string()
    assert "dynamic-slice(%x, %y.reshape" in text


@pytest.mark.parametrize("direction", ["GE", "LE"])
def test_equal_elements_are_sorted_by_a_comparison_that_holds_for_them(
    engine: JaxEngine, direction: str
) -> None:
    text = f"""HloModule sorting
        order {{ a = pred[] parameter(0) b = pred[] parameter(1) c = s64[] parameter(2) d = s64[] parameter(3)
          ROOT r = pred[] compare(a, b), direction={direction} }}
        ENTRY main {{ x = pred[1048576] parameter(0) i = s64[1048576] iota(), iota_dimension=0
          ROOT s = (pred[1048576], s64[1048576]) sort(x, i), dimensions={{0}}, to_apply=order }}"""
    mask = np.zeros(1 << 20, bool)
    mask[[3, 77]] = True
    values, places = computed(engine, text, mask)
    marked = slice(0, 2) if direction == "GE" else slice(-2, None)
    assert sorted(places[marked].tolist()) == [3, 77]
    assert values[marked].all()
    assert sorted(places.tolist()) == list(range(1 << 20))


def resizing(target: str, of: tuple[int, ...], to: tuple[int, ...], configuration: str) -> str:
    source, result = (f"f32[{','.join(map(str, dims))}]" for dims in (of, to))
    return f"""HloModule resizing
        ENTRY main {{ x = {source} parameter(0)
          ROOT r = {result} custom-call(x), custom_call_target="{target}",
            backend_config="\\"{configuration}\\"" }}"""


@pytest.mark.parametrize("size", [(7, 5), (2, 3), (1, 1), (9, 4)])
@pytest.mark.parametrize(
    ("target", "configuration", "options"),
    [
        ("ResizeBilinear", "01", {"mode": "bilinear"}),
        ("ResizeBilinear", "10", {"mode": "bilinear", "align_corners": True}),
        ("ResizeNearest", "00", {"mode": "nearest"}),
    ],
)
def test_images_are_resized_as_torch_does(
    engine: JaxEngine, target: str, configuration: str, options: dict[str, Any], size: tuple[int, int]
) -> None:
    # torch_xla gives the width before the height, and the channels last.
    order = (0, 3, 2, 1)
    image = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = torch.nn.functional.interpolate(image, size, **options)
    weights = torch.linspace(0, 1, expected.numel()).reshape(expected.shape)
    (gradient,) = torch.autograd.grad(expected, image, weights)

    def both_ways(tensor: torch.Tensor) -> Any:
        return np.ascontiguousarray(tensor.detach().permute(order).numpy())

    before, after = both_ways(image), both_ways(expected)
    forward = resizing(target, before.shape, after.shape, configuration)
    (resized,) = computed(engine, forward, before)
    np.testing.assert_allclose(resized, after, rtol=1e-6, atol=1e-6)
    backward = resizing(f"{target}Grad", after.shape, before.shape, configuration)
    (back,) = computed(engine, backward, both_ways(weights))
    np.testing.assert_allclose(back, both_ways(gradient), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dims", [(4, 4), (5, 3), (2, 3, 5), (2, 3, 6, 6)])
def test_matrices_are_decomposed(engine: JaxEngine, dims: tuple[int, ...]) -> None:
    *batch, rows, columns = dims
    count = min(rows, columns)

    def shape(kind: str, *sizes: int) -> str:
        return f"{kind}[{','.join(map(str, (*batch, *sizes)))}]"

    types = [shape("f32", rows, columns), shape("s32", count), shape("s32", rows)]
    text = f"""HloModule decomposing
        ENTRY main {{ x = {types[0]} parameter(0)
          ROOT r = ({", ".join(types)}) custom-call(x), custom_call_target="LuDecomposition" }}"""
    matrices = np.random.default_rng(0).standard_normal(dims).astype(np.float32)
    factors, exchanged, order = computed(engine, text, matrices)
    found, pivots = torch.linalg.lu_factor(torch.from_numpy(matrices))
    np.testing.assert_allclose(factors, found.numpy(), rtol=1e-4, atol=1e-5)
    # torch counts from 1.
    assert exchanged.tolist() == (pivots.numpy() - 1).tolist()
    lower = np.tril(factors[..., :count], -1) + np.eye(rows, count, dtype=np.float32)
    product = lower @ np.triu(factors[..., :count, :])
    np.testing.assert_allclose(product, np.take_along_axis(matrices, order[..., None], -2), atol=1e-5)


def test_a_singular_matrix_has_a_zero_on_the_diagonal(engine: JaxEngine) -> None:
    text = """HloModule decomposing
        ENTRY main { x = f32[2,2] parameter(0)
          ROOT r = (f32[2,2], s32[2], s32[2]) custom-call(x), custom_call_target="LuDecomposition" }"""
    factors, _, _ = computed(engine, text, np.ones((2, 2), np.float32))
    assert factors.tolist() == [[1, 1], [1, 0]]


def test_a_result_of_an_expansion_can_be_that_of_the_program(engine: JaxEngine) -> None:
    # XLA ended the process over the sharding that jax wrote for it, whose mesh the module does not have.
    text = """HloModule decomposing
        ENTRY main { x = f32[2,2] parameter(0)
          r = (f32[2,2], s32[2], s32[2]) custom-call(x), custom_call_target="LuDecomposition"
          ROOT f = f32[2,2] get-tuple-element(r), index=0 }"""
    expanded = HloModule.from_serialized_hlo_module_proto(tpu.expanded(module(text))).to_string()
    assert "while(" in expanded
    assert "sharding" not in expanded
    (factors,) = computed(engine, text, np.array([[2, 4], [1, 3]], np.float32))
    assert factors.tolist() == [[2, 4], [0.5, 1]]


@pytest.mark.slow
def test_an_expansion_leaves_jax_to_its_user() -> None:
    # jax would open each device that it finds, a GPU too, whose memory the plugin then lacks.
    program = """if True:
        import jax
        from jax._src import xla_bridge
        from polyxla_bridge.engine.expansions import tpu
        from polyxla_testing.engine_conformance import DECOMPOSING, module
        expanded = tpu.expanded(module(DECOMPOSING))
        assert expanded != module(DECOMPOSING)
        # A sharding names a mesh that the program does not have, and ends XLA's compiler.
        assert b"sdy" not in expanded
        assert not xla_bridge.backends_are_initialized()
        assert not jax.config.jax_enable_x64"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
