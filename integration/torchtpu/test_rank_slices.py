"""TorchTPU's programs on several emulated slices."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
# Ranks count along y first, as the chips of a v4's host do.
CHIPS = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]


def test_torch_tpu_sees_slices_with_coordinates_of_their_own(clean_environ: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polyxla", "run", "--each", str(PROGRAMS / "rank_slices.py")],
        env={**clean_environ, "POLYXLA_EMULATE": "2xv4-8"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    described = re.findall(r"^DESCRIBED (.*)$", done.stdout, re.MULTILINE)
    places = [(slice_index, *chip) for slice_index in range(2) for chip in CHIPS]
    mesh = [[0, 1, 2, 3], [4, 5, 6, 7]]
    expected = [[rank, str(rank // 4), 28, places, mesh] for rank in range(8)]
    assert sorted(ast.literal_eval(text) for text in described) == expected


@pytest.mark.long
def test_a_decoder_trains_on_two_slices_as_on_the_cpu(
    train_on_tpu: Callable[..., list[float]], train_on_cpu: Callable[..., list[float]]
) -> None:
    program = PROGRAMS / "decoder.py"
    on_cpu = train_on_cpu(program, "none", "cpu")
    each = ["-m", "polyxla", "run", "--each"]
    on_slices = train_on_tpu("2xv4-8", 8, program, "ddp", launcher=each)
    assert on_slices == pytest.approx(on_cpu, abs=1e-5)
