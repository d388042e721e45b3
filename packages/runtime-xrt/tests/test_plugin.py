"""Runtime xrt says when it is asked for, and that it cannot run yet."""

from __future__ import annotations

import pytest

from polyxla import Claim, Setting
from polyxla_xrt import env
from polyxla_xrt.plugin import polyxla_discover_devices

CONFIG = "tpu_worker;0;10.39.209.42:8470"
MAP = {env.XRT_DEVICE_MAP: "TPU:0;/job:tpu_worker/replica:0/task:0/device:TPU:0"}
WORKERS = {env.XRT_WORKERS: "tpu_worker:0;grpc://10.39.209.42:8470"}


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({env.XRT_TPU_CONFIG: CONFIG}, f"XRT_TPU_CONFIG={CONFIG}"),
        (MAP | WORKERS, "XRT_DEVICE_MAP with XRT_WORKERS"),
        (MAP | WORKERS | {env.XRT_TPU_CONFIG: CONFIG}, f"XRT_TPU_CONFIG={CONFIG}"),
    ],
)
def test_a_complete_configuration_claims_the_environment(environ: dict[str, str], reason: str) -> None:
    found = polyxla_discover_devices(environ)
    assert found.claim is Claim.CONFIGURED
    assert found.reason == reason


@pytest.mark.parametrize("environ", [{}, MAP, WORKERS, {env.XRT_TPU_CONFIG: ""}, {"PJRT_DEVICE": "TPU"}])
def test_anything_less_claims_nothing(environ: dict[str, str]) -> None:
    found = polyxla_discover_devices(environ)
    assert found.claim is Claim.NONE
    assert found.reason == "XRT_TPU_CONFIG is not set"


def test_it_offers_no_device_and_says_what_to_do_instead() -> None:
    found = polyxla_discover_devices({env.XRT_TPU_CONFIG: CONFIG})
    assert not found.devices
    assert found.unavailable == "this version cannot drive a TPU node yet"
    assert found.fix
    assert "PJRT_DEVICE=CPU" in found.fix


def test_every_variable_it_reads_is_shown_with_its_origin() -> None:
    found = polyxla_discover_devices({env.XRT_TPU_CONFIG: CONFIG})
    assert found.variables == {
        "XRT_TPU_CONFIG": Setting(CONFIG, "environment"),
        "XRT_DEVICE_MAP": Setting(None, "default"),
        "XRT_WORKERS": Setting(None, "default"),
    }
