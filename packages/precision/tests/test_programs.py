"""The dtypes that XLA computes in, read from the programs that it receives (programs.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# The `minimums` session has no torch_xla; this package's own test session has.
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch_xla"), reason="needs torch_xla")

MIXED, TRUE, FULL = "bf16-mixed", "bf16-true", "32-true"
# Its output has 7 columns, and nothing else in the network has 7 of anything.
HEAD = re.compile(r"\b7\b")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("programs") / "programs.json"
    script = Path(__file__).with_name("programs.py")
    variables = {**os.environ, "PJRT_DEVICE": "CPU"}
    subprocess.run([sys.executable, str(script), str(path)], check=True, env=variables, timeout=240)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _products(program: dict[str, Any]) -> list[tuple[str, set[str], str]]:
    """Return the kind, the dtypes and the shapes of each matrix product and convolution."""
    lines = re.findall(r" = (\w+\[.*?) (dot|convolution)\((.*?)\),", program["hlo"])
    return [
        (kind, set(re.findall(r"(\w+)\[", f"{out} {operands}")), f"{out} {operands}")
        for out, kind, operands in lines
    ]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (FULL, "f32"),
        (MIXED, "bf16"),
        (TRUE, "bf16"),
        # Activations are recomputed outside of the policy's context.
        (f"{MIXED}, again", "bf16"),
        (f"{TRUE}, again", "bf16"),
    ],
)
def test_every_product_and_convolution_has_the_policys_dtype(
    seen: dict[str, Any], name: str, dtype: str
) -> None:
    products = _products(seen["policies"][name])
    # Forward and backward: four layers, of which the first needs no gradient of its input.
    assert {kind for kind, _, _ in products} == {"dot", "convolution"}
    assert len(products) >= 4 + 4 + 2
    assert [dtypes for _, dtypes, _ in products] == [{dtype}] * len(products)


def test_full_precision_has_no_bfloat16_anywhere(seen: dict[str, Any]) -> None:
    assert "bf16" not in seen["policies"][FULL]["hlo"]


@pytest.mark.parametrize("name", [MIXED, TRUE])
def test_only_the_head_in_keep_float32_computes_in_float32(seen: dict[str, Any], name: str) -> None:
    program = seen["policies"][f"{name}, kept"]
    products = [(bool(HEAD.search(shapes)), dtypes) for _, dtypes, shapes in _products(program)]
    heads = [dtypes for is_head, dtypes in products if is_head]
    others = [dtypes for is_head, dtypes in products if not is_head]
    # Its output, and the gradients of its input and of its weight.
    assert heads == [{"f32"}] * 3
    assert others == [{"bf16"}] * len(others)
    assert len(others) >= 7


@pytest.mark.parametrize(
    ("name", "body", "head"),
    [
        (FULL, "float32", "float32"),
        (MIXED, "float32", "float32"),
        (f"{MIXED}, kept", "float32", "float32"),
        (TRUE, "bfloat16", "bfloat16"),
        (f"{TRUE}, kept", "bfloat16", "float32"),
    ],
)
def test_parameters_gradients_and_loss_have_the_policys_dtypes(
    seen: dict[str, Any], name: str, body: str, head: str
) -> None:
    program = seen["policies"][name]
    assert program["gradients"] == program["parameters"]
    dtypes = {name: f"torch.{head if name.startswith('head.') else body}" for name in program["parameters"]}
    assert program["parameters"] == dtypes
    assert program["loss"] == "torch.float32"


@pytest.mark.parametrize(("name", "dtype"), [(FULL, "f32"), (MIXED, "f32"), (TRUE, "bf16")])
def test_uploaded_tensors_have_the_policys_dtype(seen: dict[str, Any], name: str, dtype: str) -> None:
    entry = seen["policies"][name]["hlo"].split("entry_computation_layout={(", 1)[1].split(")->", 1)[0]
    assert {name for name in re.findall(r"(\w+)\[", entry) if name != "s64"} == {dtype}


def test_a_conversion_on_the_device_keeps_tied_weights_tied(seen: dict[str, Any]) -> None:
    assert seen["tied"] is True
