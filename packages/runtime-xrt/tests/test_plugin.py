"""Runtime xrt claims an environment that describes a TPU node, and reports its cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyxla.plugin import Claim, Setting
from polyxla_xrt import env
from polyxla_xrt.plugin import polyxla_discover_devices, polyxla_environment, polyxla_variables

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
def test_an_incomplete_configuration_claims_nothing(environ: dict[str, str]) -> None:
    found = polyxla_discover_devices(environ)
    assert found.claim is Claim.NONE
    assert found.reason == "XRT_TPU_CONFIG is not set"


def test_discovery_offers_every_core_of_the_worker() -> None:
    found = polyxla_discover_devices({env.XRT_TPU_CONFIG: CONFIG, env.TPU_NUM_DEVICES: "2"})
    assert (found.unavailable, found.kind, found.host_count, found.growable) == (None, "TPU", 1, False)
    assert [(device.index, device.kind) for device in found.devices] == [(0, "TPU"), (1, "TPU")]
    assert found.devices[1].name == "core 1 of tpu_worker:0"


def test_why_torch_xla_cannot_be_imported_is_said_before_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    found = polyxla_discover_devices({env.XRT_TPU_CONFIG: CONFIG})
    assert found.claim is Claim.CONFIGURED
    assert found.unavailable == "torch and torch_xla are not installed"
    assert "pip install 'torch==2.9.1' 'torch_xla==2.9.0'" in found.fix


def test_a_script_that_changes_its_directory_finds_its_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {env.XRT_TPU_CONFIG: CONFIG, env.TPU_NUM_DEVICES: "1"}
    files = {env.POLYXLA_XRT_TOKEN_FILE: "token", env.POLYXLA_XRT_TLS_CA: "/etc/worker.pem"}
    found = polyxla_environment(given | files, (0,))
    assert found[env.POLYXLA_XRT_TOKEN_FILE] == str(tmp_path / "token")
    assert found[env.POLYXLA_XRT_TLS_CA] == "/etc/worker.pem"
    assert env.POLYXLA_XRT_TLS_KEY not in found


def test_without_a_configuration_discovery_shows_an_example() -> None:
    found = polyxla_discover_devices({})
    assert found.unavailable == "no variable describes a TPU node"
    assert "XRT_TPU_CONFIG='tpu_worker;0;HOST:8470'" in found.fix


def test_discovery_reports_every_variable_with_its_origin() -> None:
    found = polyxla_discover_devices({env.XRT_TPU_CONFIG: CONFIG})
    assert found.variables == {
        "XRT_TPU_CONFIG": Setting(CONFIG, "environment"),
        "XRT_DEVICE_MAP": Setting(None, "default"),
        "XRT_WORKERS": Setting(None, "default"),
    }


def test_a_host_of_a_pod_that_is_not_its_first_is_claimed() -> None:
    environ = {env.XRT_MESH_SERVICE_ADDRESS: "a:8477", env.XRT_LOCAL_WORKER: "w:1"}
    found = polyxla_discover_devices(environ | {env.XRT_SHARD_WORLD_SIZE: "2"})
    assert found.claim is Claim.CONFIGURED
    assert found.reason == "XRT_MESH_SERVICE_ADDRESS=a:8477 with XRT_LOCAL_WORKER=w:1"
    assert found.unavailable is None
    assert (len(found.devices), found.host_count) == (16, 2)


@pytest.mark.parametrize(
    "environ",
    [{env.TPU_NUM_DEVICES: "8"}, {env.XRT_MESH_SERVICE_ADDRESS: "a:1"}, {env.XRT_LOCAL_WORKER: "w:1"}],
)
def test_a_variable_that_only_supplements_a_configuration_claims_nothing(environ: dict[str, str]) -> None:
    assert polyxla_discover_devices(environ).claim is Claim.NONE


def test_a_wrong_configuration_is_claimed_and_explained() -> None:
    found = polyxla_discover_devices({env.XRT_TPU_CONFIG: "tpu_worker;0;:8470"})
    assert found.claim is Claim.CONFIGURED
    assert found.unavailable is not None
    assert found.unavailable.startswith("':8470' has no host")
    assert "(from" not in found.unavailable
    assert found.fix == "Write the address as host:port, such as 10.0.0.2:8470."


def test_an_invalid_variable_other_than_the_reason_is_named() -> None:
    found = polyxla_discover_devices({env.XRT_TPU_CONFIG: CONFIG, env.TPU_NUM_DEVICES: "0"})
    assert found.unavailable == "'0' is not an integer of at least 1 (from TPU_NUM_DEVICES=0)"
    assert found.variables["TPU_NUM_DEVICES"] == Setting("0", "environment")


def test_half_a_map_is_explained_though_it_claims_nothing() -> None:
    found = polyxla_discover_devices(MAP)
    assert found.unavailable is not None
    assert "XRT_DEVICE_MAP needs XRT_WORKERS" in found.unavailable


@pytest.mark.parametrize("config", [CONFIG, "wrong", None])
def test_warnings_are_passed_on(config: str | None) -> None:
    environ = {"XRT_MESH_CONECT_WAIT": "5"} | ({env.XRT_TPU_CONFIG: config} if config else {})
    (note,) = polyxla_discover_devices(environ).notes
    assert note.endswith("Did you mean XRT_MESH_CONNECT_WAIT?")


def test_warnings_of_a_valid_configuration_are_passed_on() -> None:
    (note,) = polyxla_discover_devices({env.XRT_TPU_CONFIG: "w;0;grpc://a:1"}).notes
    assert note.startswith("XRT_TPU_CONFIG contains grpc://")


@pytest.mark.parametrize("more", [{}, {env.TPU_NUM_DEVICES: "8"}], ids=["alone", "with-cores"])
def test_a_misspelt_variable_alone_claims_the_job_and_refuses_it(more: dict[str, str]) -> None:
    found = polyxla_discover_devices({"XRT_TPU_CONFG": "tpu_worker;0;10.0.0.2:8470", **more})
    assert found.claim is Claim.CONFIGURED
    assert found.unavailable == "XRT_TPU_CONFG is not an XRT variable"
    assert found.fix == "Did you mean XRT_TPU_CONFIG? Unset XRT_TPU_CONFG if this job is not for a TPU node."


def test_a_name_of_another_programs_claims_nothing() -> None:
    found = polyxla_discover_devices({"XRT_INI_PATH": "/opt/xrt.ini"})
    assert found.claim is Claim.NONE
    assert found.notes == ("XRT_INI_PATH is not an XRT variable and has no effect.",)


def test_every_variable_with_polyxlas_prefix_is_declared() -> None:
    names = polyxla_variables()
    assert {env.POLYXLA_XRT_ASSIGNMENT, "POLYXLA_STALL_TIMEOUT_S"} < names
    assert all(name.startswith("POLYXLA_") for name in names)
