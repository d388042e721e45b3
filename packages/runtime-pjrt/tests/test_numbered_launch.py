"""Plain torch_xla programs: results are keyed by ordinal, whatever the order of the processes."""

from __future__ import annotations

from typing import Any

import pytest
from torch_xla._internal import pjrt

from polyxla.xla.torch_xla_launch import TorchXlaLaunch, handle_launches


def test_a_plain_launch_returns_results_by_ordinal(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(plan: list[int], launched: TorchXlaLaunch) -> list[tuple[int, Any]]:
        # As on a TPU host whose processes libtpu numbers by the coordinates of their chips.
        return [(ordinal, launched.function(ordinal)) for ordinal in plan]

    monkeypatch.setattr(pjrt, "run_multiprocess", pjrt.run_multiprocess)
    handle_launches(lambda: [2, 0, 3, 1], run)
    results = pjrt.run_multiprocess(str)
    assert list(results.items()) == [(0, "0"), (1, "1"), (2, "2"), (3, "3")]
