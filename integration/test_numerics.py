"""An emulated TPU that multiplies float32 as a TPU does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polyxla_testing import RuntimeUnderTest

PROGRAM = Path(__file__).parent / "programs" / "products.py"
PAGE = Path(__file__).parents[1] / "docs" / "precision.md"

pytestmark = pytest.mark.emulated_tpu


def run(file: Path, numerics: str = "", program: Path = PROGRAM) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"POLYXLA_EMULATE": "v5e-1", "POLYXLA_EMULATE_NUMERICS": numerics}
    command = [sys.executable, str(program), str(file)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)


def computed(file: Path, numerics: str = "") -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    done = run(file, numerics)
    assert done.returncode == 0, done.stderr
    said = (
        "names, layout and products of float32 are a TPU's, other numbers and speed the CPU's" in done.stderr
    )
    assert said == bool(numerics), done.stderr
    found: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = torch.load(file)
    return found


@pytest.mark.slow
def test_products_and_gradients_are_those_of_rounded_operands(
    runtime: RuntimeUnderTest, tmp_path: Path
) -> None:
    on_tpu, on_cpu = (computed(tmp_path / f"of-{numerics}.pt", numerics) for numerics in ("tpu", ""))
    for name, (tensors, _) in on_tpu.items():
        for number, (found, exact, rounded) in enumerate(zip(tensors, *on_cpu[name], strict=True)):
            # TorchTPU computes the gradient of softmax by one more product, which is rounded too.
            is_rounded_twice = name == "attention" and number > 0 and runtime.name == "torchtpu"
            assert torch.equal(found, rounded) != is_rounded_twice, name
            assert not torch.equal(found, exact), name


@pytest.mark.slow
def test_products_are_as_exact_as_torchs_setting_says(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    done = run(tmp_path, "tpu", PROGRAM.with_name("float32_precision.py"))
    assert done.returncode == 0, done.stderr
    errors = {name: float(error) for name, error in map(str.split, done.stdout.splitlines())}
    assert errors["highest"] < 5e-5 < errors["high"] < 1e-3 < errors["medium"]
    assert errors["unset"] > 1e-2
    # torch_xla's program that is compiled already keeps its precision, and a warning says so.
    is_kept = runtime.name != "torchtpu"
    assert (errors["again"] > 1e-2) == is_kept
    assert ("precision of matrix products changes after a program was compiled" in done.stderr) == is_kept


def test_another_value_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path / "none.pt", "bf16")
    assert done.returncode > 0
    assert "POLYXLA_EMULATE_NUMERICS='bf16' is not 'tpu'" in done.stderr
    assert "Write that, or unset it." in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("numerics", "printed"), [("", "12.97"), ("tpu", "nan")])
def test_the_program_of_the_page_differs(numerics: str, printed: str, tmp_path: Path) -> None:
    text = PAGE.read_text()
    assert f"python distances.py\n{printed}\n" in text
    (code,) = re.findall(r"```python\n(# distances.py.*?)```", text, re.DOTALL)
    program = tmp_path / "distances.py"
    program.write_text(code)
    assert run(tmp_path, numerics, program).stdout == f"{printed}\n"
