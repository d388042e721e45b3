"""The variables of runtime xrt on the hosts of a pod, and what is wrong with a user's own."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from polyxla import UsageError
from polyxla_pod.job import PodJob

if TYPE_CHECKING:
    from conftest import Pod

ADDRESSES = ("10.0.0.1", "fd00::2")


def job(environ: dict[str, str] | None = None, *addresses: str, **fields: Any) -> PodJob:
    hosts = addresses or ADDRESSES
    return PodJob(("python", "train.py"), hosts, hosts, environ or {}, runtime="xrt", **fields)


def test_every_host_gets_the_list_of_workers_its_own_and_the_mesh() -> None:
    assert job(worker_port=9000).environ_of(1) == {
        "POLYXLA_RUNTIME": "xrt",
        "XRT_TPU_CONFIG": "c_tpu_worker;0;10.0.0.1:9000|c_tpu_worker;1;[fd00::2]:9000",
        "XRT_LOCAL_WORKER": "c_tpu_worker:1",
        "XRT_MESH_SERVICE_ADDRESS": "10.0.0.1:8477",
        "XRT_SHARD_WORLD_SIZE": "2",
        "XRT_SHARD_ORDINAL": "1",
    }


def test_one_host_needs_no_mesh() -> None:
    assert job({}, "tpu-0").environ_of(0) == {
        "POLYXLA_RUNTIME": "xrt",
        "XRT_TPU_CONFIG": "c_tpu_worker;0;tpu-0:8470",
        "XRT_LOCAL_WORKER": "c_tpu_worker:0",
    }


def test_the_variable_chooses_the_runtime_too_and_the_users_mesh_and_cores_win() -> None:
    own = {
        "POLYXLA_RUNTIME": "xrt",
        "XRT_MESH_SERVICE_ADDRESS": "10.0.0.1:9999",
        "TPU_NUM_DEVICES": "4",
    }
    environ = PodJob(("true",), ADDRESSES, ADDRESSES, own).environ_of(0)
    assert environ["XRT_LOCAL_WORKER"] == "c_tpu_worker:0"
    assert own.items() <= environ.items()


def test_other_runtimes_get_none_of_them() -> None:
    other = PodJob(("true",), ADDRESSES, ADDRESSES, {"POLYXLA_RUNTIME": "pjrt"}, runtime="xrt")
    assert other.environ_of(0) == {"POLYXLA_RUNTIME": "pjrt"}


def test_a_users_own_description_is_left_alone() -> None:
    own = {
        "XRT_TPU_CONFIG": "w;0;10.0.0.8:1|w;1;10.0.0.9:1",
        "XRT_LOCAL_WORKER": "w:{host}",
        "XRT_MESH_SERVICE_ADDRESS": "10.0.0.1:2",
    }
    found = job(own).environ_of(1)
    assert found == {"POLYXLA_RUNTIME": "xrt", **own, "XRT_LOCAL_WORKER": "w:1"}
    mapped = {"XRT_DEVICE_MAP": "map", "XRT_WORKERS": "workers"}
    assert job(mapped, "a").environ_of(0) == {"POLYXLA_RUNTIME": "xrt", **mapped}


@pytest.mark.parametrize(
    ("own", "missing"),
    [
        ({"XRT_TPU_CONFIG": "w;0;a:1"}, "XRT_LOCAL_WORKER, XRT_MESH_SERVICE_ADDRESS is missing"),
        ({"XRT_LOCAL_WORKER": "w:0"}, "XRT_TPU_CONFIG, XRT_MESH_SERVICE_ADDRESS is missing"),
        ({"XRT_WORKERS": "x", "XRT_LOCAL_WORKER": "w:0"}, "XRT_TPU_CONFIG, XRT_MESH_SERVICE_ADDRESS"),
        ({"XRT_SHARD_WORLD_SIZE": "4"}, "XRT_TPU_CONFIG, XRT_LOCAL_WORKER, XRT_MESH_SERVICE_ADDRESS"),
    ],
)
def test_half_of_a_description_is_an_error(own: dict[str, str], missing: str) -> None:
    with pytest.raises(UsageError) as caught:
        job(own)
    assert missing in str(caught.value)
    assert "Set these, too, such as --env XRT_LOCAL_WORKER=c_tpu_worker:{host}" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"POLYXLA_RUNTIME": "pjrt"}, "only runtime xrt has workers, and the command uses pjrt"),
        ({"XRT_TPU_CONFIG": "w;0;a:1"}, "with a token made for this job, but XRT_TPU_CONFIG is set"),
        ({"POLYXLA_XRT_TOKEN_FILE": "file"}, "but POLYXLA_XRT_TOKEN_FILE is set"),
        ({"POLYXLA_XRT_TLS_CA": "file"}, "but POLYXLA_XRT_TLS_CA is set"),
        ({"TPU_NUM_DEVICES": "many"}, "'many' is not a number of cores (from --env TPU_NUM_DEVICES=many)"),
        ({"TPU_NUM_DEVICES": "0"}, "'0' is not a number of cores"),
    ],
)
def test_workers_that_cannot_be_started_are_an_error(environ: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        job(environ, starts_workers=True)
    assert text in str(caught.value)


def test_workers_need_the_runtime() -> None:
    with pytest.raises(UsageError, match=r"the command uses what each host chooses .* Write --runtime xrt"):
        PodJob(("true",), ("a",), ("a",), starts_workers=True)


def test_a_worker_listens_at_its_hosts_address_with_the_jobs_cores() -> None:
    command = job({"TPU_NUM_DEVICES": "4"}, starts_workers=True, python="/opt/python").worker_command(1)
    assert command[:4] == ["/opt/python", "-m", "polyxla", "worker"]
    assert " ".join(command[4:]) == "--address [fd00::2]:8470 --devices 4 --token-file {token_file}"


def test_a_dry_run_shows_the_workers_and_no_token(stand_in: Pod) -> None:
    how = ["--runtime", "xrt", "--workers", "--dry-run"]
    done = stand_in.run("me@10.0.0.1,10.0.0.2", *how, "--", "true")
    assert done.returncode == 0, done.stderr
    first = [line for line in done.stdout.splitlines() if line.startswith("[w0]   first: env ")]
    assert len(first) == 1
    assert first[0].endswith("worker --address 10.0.0.1:8470 --devices 8 --token-file '{token_file}'")
    document = json.loads(stand_in.run("10.0.0.1", *how, "--json", "--", "true").stdout)
    assert document["hosts"][0]["worker"][-1] == "{token_file}"
    assert "POLYXLA_XRT_TOKEN_FILE" not in document["hosts"][0]["environment"]


@pytest.mark.skipif(find_spec("polyxla_xrt") is not None, reason="runtime xrt is installed here")
def test_a_host_without_the_runtime_is_named_before_and_after_the_preflight(stand_in: Pod) -> None:
    how = ["--runtime", "xrt", "--workers", "--", "true"]
    done = stand_in.run("127.0.0.1", *how)
    assert done.returncode == 2
    assert "w0 (127.0.0.1): does not have runtime xrt. Install polyxla-runtime-xrt on it." in done.stderr
    done = stand_in.run("127.0.0.1", "--no-preflight", "--retry", "1", *how)
    assert done.returncode == 2
    assert "its worker at 127.0.0.1:8470 ended with exit code 2; it printed last: " in done.stderr
    assert "there is no command worker. Install the package that brings it: pip install" in done.stderr
    assert "starting again" not in done.stderr
