"""The waits that a user may set are parsed, or refused with the line that fixes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from polyxla import UsageError
from polyxla_xrt.config.timeouts import job_wait_s, mesh_connect_wait_s, stall_timeout_s

Read = Callable[[Mapping[str, str]], float]


@pytest.mark.parametrize(
    ("read", "environ", "seconds"),
    [
        (job_wait_s, {}, 0.0),
        (job_wait_s, {"POLYXLA_WAIT_S": "0"}, 0.0),
        (job_wait_s, {"POLYXLA_WAIT_S": " 2.5 "}, 2.5),
        (job_wait_s, {"POLYXLA_WAIT_S": "604800"}, 604800.0),
        (stall_timeout_s, {}, 300.0),
        (stall_timeout_s, {"POLYXLA_STALL_TIMEOUT_S": "0.5"}, 0.5),
        (stall_timeout_s, {"POLYXLA_STALL_TIMEOUT_S": ""}, 300.0),
        (mesh_connect_wait_s, {}, 300),
        (mesh_connect_wait_s, {"XRT_MESH_CONNECT_WAIT": "7"}, 7),
    ],
)
def test_valid_waits(read: Read, environ: dict[str, str], seconds: float) -> None:
    assert read(environ) == seconds


@pytest.mark.parametrize(
    ("read", "name", "text", "what"),
    [
        (job_wait_s, "POLYXLA_WAIT_S", "-1", "'-1' is not a number of seconds from 0 to 604800"),
        (job_wait_s, "POLYXLA_WAIT_S", "nan", "'nan' is not a number of seconds from 0 to 604800"),
        (job_wait_s, "POLYXLA_WAIT_S", "604801", "'604801' is not a number of seconds from 0 to 604800"),
        (job_wait_s, "POLYXLA_WAIT_S", "long", "'long' is not a number of seconds from 0 to 604800"),
        (stall_timeout_s, "POLYXLA_STALL_TIMEOUT_S", "0", "'0' is not a number of seconds above 0"),
        (stall_timeout_s, "POLYXLA_STALL_TIMEOUT_S", "nan", "'nan' is not a number of seconds above 0"),
        (stall_timeout_s, "POLYXLA_STALL_TIMEOUT_S", "long", "'long' is not a number of seconds above 0"),
        (mesh_connect_wait_s, "XRT_MESH_CONNECT_WAIT", "0", "'0' is not an integer of at least 1"),
    ],
)
def test_invalid_waits(read: Read, name: str, text: str, what: str) -> None:
    with pytest.raises(UsageError) as wrong:
        read({name: text})
    assert (wrong.value.what, wrong.value.where) == (what, f"{name}={text}")
    assert wrong.value.fix.startswith("Write ")
