"""The peak of each TPU generation, and the share of it that a step reaches."""

from __future__ import annotations

import pytest

from polyxla.plugin import GENERATIONS, generation_of
from polyxla_training.observe.performance import utilization


def test_utilization_is_of_one_devices_share_of_a_chip() -> None:
    assert utilization(275e12, 2.0, "TPU v4") == pytest.approx(0.5)
    # Two devices share a chip of v3.
    assert utilization(123e12 / 2, 1.0, "TPU v3") == pytest.approx(1.0)


@pytest.mark.parametrize("kind", [None, "", "cpu", "TPU v99"])
def test_an_unknown_chip_has_no_utilization(kind: str | None) -> None:
    assert utilization(1e12, 1.0, kind) is None


def test_every_generation_is_known_under_the_names_of_libtpu_and_torchtpu() -> None:
    assert generation_of("TPU v5 lite") is GENERATIONS["v5e"]
    assert generation_of("TPU v6 lite") is GENERATIONS["v6e"]
    assert generation_of("TPU7x") is generation_of("TPU v7") is GENERATIONS["v7x"]
    assert all(generation_of(f"TPU {name}") is generation for name, generation in GENERATIONS.items())
