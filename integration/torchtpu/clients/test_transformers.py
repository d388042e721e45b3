"""A program of transformers, which does not mention polyxla, trains on emulated TPUs as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

LLAMA = Path(__file__).parent / "programs" / "llama.py"
STEPS = 20
TOLERANCE = 1e-5


@pytest.mark.parametrize(("strategy", "devices"), [("none", 1), ("ddp", 4), ("tp", 4)])
def test_a_llama_of_transformers_trains_as_on_the_cpu(
    train_on_tpu: Callable[..., list[float]],
    train_on_cpu: Callable[..., list[float]],
    strategy: str,
    devices: int,
) -> None:
    expected = train_on_cpu(LLAMA, "none", "cpu")
    assert len(expected) == STEPS
    found = train_on_tpu(f"v5e-{devices}", devices, LLAMA, strategy)
    assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
