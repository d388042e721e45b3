"""Logged tensors are read once, and values that are not finite are printed once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from polyxla_training.observe import LoggedValues


def test_a_step_is_read_once_for_all_listeners(counters: Any, device_scalar: Callable[[float], Any]) -> None:
    logged_values = LoggedValues(counters)
    for _ in range(3):
        assert logged_values.read(1, {"loss": device_scalar(2.0)}) == {"loss": 2.0}
    assert logged_values.read(2, {"loss": device_scalar(3.0)}) == {"loss": 3.0}
    assert counters.reads == logged_values.host_reads == 2


def test_nan_and_infinity_are_printed_once_for_each_name(capsys: pytest.CaptureFixture[str]) -> None:
    logged_values = LoggedValues()
    for step in range(3, 6):
        logged_values.read(step, {"loss": math.nan, "norm": math.inf if step == 5 else 1.0})
    assert capsys.readouterr().err.splitlines() == [
        "polyxla: loss is nan at step 3",
        "polyxla: norm is inf at step 5",
    ]
    assert logged_values.not_finite == {"loss": 3, "norm": 5}
