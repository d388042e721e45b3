"""Discovery: what claims this runtime, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyxla import UsageError
from polyxla.plugin import POLYXLA_EMULATE, Claim
from polyxla_torchtpu import env
from polyxla_torchtpu.discovery import PJRT_DEVICE, discover
from polyxla_torchtpu.plan import plan_for


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    """A list of PCI devices without a TPU."""
    return tmp_path


@pytest.fixture
def v4_host(tmp_path: Path) -> Path:
    """A list of PCI devices with the four chips of a v4 host."""
    for chip in range(4):
        directory = tmp_path / f"0000:00:0{chip + 4}.0"
        directory.mkdir()
        (directory / "vendor").write_text("0x1ae0\n")
        (directory / "device").write_text("0x005e\n")
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "claim", "kind"),
    [
        ({}, Claim.FALLBACK, "CPU"),
        ({POLYXLA_EMULATE: "v5e-8"}, Claim.EXPLICIT, "TPU"),
        ({env.TORCH_TPU_TOPOLOGY: "2,2,1"}, Claim.CONFIGURED, "CPU"),
        ({env.TORCH_TPU_SLICEBUILDER_ADDRESSES: "localhost:1"}, Claim.CONFIGURED, "CPU"),
    ],
)
def test_variables_claim_the_runtime(laptop: Path, environ: dict[str, str], claim: Claim, kind: str) -> None:
    found = discover(environ, "auto", laptop)
    assert (found.claim, found.kind, found.unavailable) == (claim, kind, None)


def test_attached_chips_claim_it(v4_host: Path) -> None:
    environ = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-8"}
    found = discover(environ, "auto", v4_host)
    assert (found.claim, found.kind, len(found.devices)) == (Claim.ATTACHED, "TPU", 4)


@pytest.mark.parametrize(
    ("name", "count"), [("v4-8", 4), ("v5e-8", 8), ("v6e-4", 4), ("v4-16", 8), ("tpu7x-8", 8)]
)
def test_an_emulated_tpu_has_its_chips(laptop: Path, name: str, count: int) -> None:
    assert len(discover({POLYXLA_EMULATE: name}, "auto", laptop).devices) == count


def test_the_cpu_emulates_as_many_devices_as_asked_for(laptop: Path) -> None:
    found = discover({}, "auto", laptop)
    assert (len(found.devices), found.growable) == (1, True)
    assert plan_for({}, "CPU", (0, 1, 2)).layout.replicas == 3


def test_a_variable_of_torch_xla_is_named_as_one_to_unset(laptop: Path) -> None:
    (note,) = discover({PJRT_DEVICE: "TPU"}, "auto", laptop).notes
    assert "PJRT_DEVICE=TPU" in note
    assert "unset it" in note


@pytest.mark.parametrize(("name", "text"), [("v3-8", "begins with v4"), ("v4-9", "does not come with 9")])
def test_a_tpu_that_torchtpu_does_not_drive_is_refused(laptop: Path, name: str, text: str) -> None:
    found = discover({POLYXLA_EMULATE: name}, "auto", laptop)
    assert text in (found.unavailable or "")
    assert found.fix


def test_half_a_chip_is_refused() -> None:
    with pytest.raises(UsageError, match="the cores \\[3\\] are not whole chips, which have 2 cores each"):
        plan_for({POLYXLA_EMULATE: "tpu7x-8"}, "TPU", (3,))


def test_a_tpu_without_chips_is_refused_with_how_to_emulate_one(laptop: Path) -> None:
    found = discover({}, "tpu", laptop)
    assert "no TPU chip is attached" in (found.unavailable or "")
    assert "POLYXLA_EMULATE" in found.fix
