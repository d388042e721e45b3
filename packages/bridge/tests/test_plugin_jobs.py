"""Engines on PJRT plugins in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Outcomes = Callable[..., list[tuple[int, list[str], str]]]
OnPlugin = Callable[[int], dict[str, str]]


@pytest.mark.long
def test_many_jobs_in_one_process_leave_nothing_behind(outcomes: Outcomes, on_plugin: OnPlugin) -> None:
    ((code, lines, err),) = outcomes("plugin_jobs.py", "many_jobs", replicas=1, processes=1, **on_plugin(2))
    assert code == 0, err
    (growth,) = map(float, lines)
    assert growth < 1.03


def emulated(directory: Path) -> dict[str, str]:
    """Return the variables of a process on an emulated libtpu."""
    return {
        "POLYXLA_LIBTPU_HOST": "v4:2x2x1",
        "POLYXLA_LIBTPU_DEV": str(directory),
        "TPU_SKIP_MDS_QUERY": "1",
        "NPROC": "16",
    }


def test_an_array_is_read_in_row_major_order_or_not_at_all(outcomes: Outcomes, tmp_path: Path) -> None:
    environ = emulated(tmp_path)
    ((code, lines, err),) = outcomes("plugin_jobs.py", "host_layouts", replicas=1, processes=1, **environ)
    assert code == 0, err
    refused = "12 ArrayType(dtype='float32', dims=(2, 1, 3)) can only be read in row-major order: transpose"
    assert [line.startswith(refused) or line for line in lines] == [
        "True",
        "True",
        True,
        "True",
        "True",
        True,
    ]


def test_an_emulated_libtpu_is_a_plugin_like_any_other(outcomes: Outcomes, tmp_path: Path) -> None:
    environ = emulated(tmp_path)
    ((code, lines, err),) = outcomes("plugin_jobs.py", "emulated_libtpu", replicas=1, processes=1, **environ)
    assert code == 0, err
    assert lines == [
        "TPU [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0)] TPU v4",
        "[3.0, 3.0, 3.0, 3.0] True",
        "[6.0, 6.0, 6.0, 6.0]",
        "68",
        "0",
    ]
    assert "Traceback" not in err
