"""Variables that are misspelt, old, or left over, on the installed runtimes."""

from __future__ import annotations

import pytest

from polyxla.plugin import from_environ
from polyxla_tools.doctor.findings import Finding, Status
from polyxla_tools.doctor.runtimes import gather_runtimes
from polyxla_tools.doctor.variables import check_variables


def findings(environ: dict[str, str]) -> list[Finding]:
    return check_variables(environ, gather_runtimes(environ, from_environ(environ)))


def test_no_variables_are_fine(environ: dict[str, str]) -> None:
    assert [finding.status for finding in findings(environ)] == [Status.OK]
    (found,) = findings(environ | {"TPU_MIN_LOG_LEVEL": "0", "PJRT_DEVICE": "CPU", "XLA_FLAGS": "--xla"})
    assert found.found == "3 set, none of them misspelt or old"


@pytest.mark.parametrize(
    ("name", "value", "status", "found", "fix"),
    [
        (
            "POLYXLA_DEVICE",
            "4",
            Status.PROBLEM,
            "POLYXLA_DEVICE is not a variable of polyxla and has no effect",
            "Did you mean POLYXLA_DEVICES?",
        ),
        ("PJRT_DEVICES", "TPU", Status.NOTE, "no runtime reads PJRT_DEVICES", "Did you mean PJRT_DEVICE?"),
        (
            "TPU_WORKER_HOSTNAME",
            "a,b",
            Status.NOTE,
            "no runtime reads TPU_WORKER_HOSTNAME",
            "Did you mean TPU_WORKER_HOSTNAMES?",
        ),
        (
            "XLA_USE_BF16",
            "1",
            Status.NOTE,
            "XLA_USE_BF16=1: torch_xla stores every float32 tensor of the device as bfloat16",
            "Unset it, and name a policy: --precision bf16-true.",
        ),
        (
            "XLA_USE_F16",
            "1",
            Status.NOTE,
            "XLA_USE_F16 has no effect: torch_xla 2.9 does not read it",
            "Unset it.",
        ),
        (
            "TPU_PROCESS_PORT",
            "8476",
            Status.NOTE,
            "TPU_PROCESS_PORT: set as in a process of another launch",
            "If this is not one: unset TPU_PROCESS_PORT",
        ),
        (
            "TPU_LIBRARY_PATH",
            "/no/libtpu.so",
            Status.PROBLEM,
            "TPU_LIBRARY_PATH=/no/libtpu.so is not a file",
            "Unset TPU_LIBRARY_PATH: the installed libtpu is found without it.",
        ),
    ],
)
def test_a_variable_is_named_with_its_remedy(
    environ: dict[str, str], name: str, value: str, status: Status, found: str, fix: str
) -> None:
    assert findings(environ | {name: value}) == [Finding(status, "variables", found, fix)]


def test_a_switch_that_is_off_is_fine(environ: dict[str, str]) -> None:
    assert [finding.status for finding in findings(environ | {"XLA_USE_BF16": "0"})] == [Status.OK]


def test_torchruns_variables_are_fine_under_torchrun(environ: dict[str, str]) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    (found,) = findings(environ | given)
    assert (
        found.found == "WORLD_SIZE, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE: set as in a process of another launch"
    )
    (fine,) = findings(environ | given | {"TORCHELASTIC_RUN_ID": "1"})
    assert fine.status is Status.OK
