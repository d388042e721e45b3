"""Full precision, as far as it can be seen without torch; the integration suite trains with it."""

from __future__ import annotations

from typing import Any, cast

from polyxla_precision import Full32


class Module:
    """Stands in for torch.nn.Module: it remembers what it was asked to become."""

    def __init__(self) -> None:
        self.dtype = "float64"

    def float(self) -> Module:
        self.dtype = "float32"
        return self


def test_convert_makes_the_parameters_float32_in_place() -> None:
    module = Module()
    assert Full32().convert(cast("Any", module)) is cast("Any", module)
    assert module.dtype == "float32"


def test_forward_changes_nothing_and_can_be_entered_every_step() -> None:
    policy = Full32()
    for _ in range(2):
        with policy.forward() as context:
            assert context is None
