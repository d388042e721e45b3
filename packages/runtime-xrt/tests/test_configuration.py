"""The environment is parsed as XRT defines it, and misconfigurations are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyxla import UsageError
from polyxla_xrt import env
from polyxla_xrt.config.configuration import Configuration, read_configuration
from polyxla_xrt.config.workers import Worker, WorkerId

NODE = {env.XRT_TPU_CONFIG: "tpu_worker;0;10.39.209.42:8470"}
POD = {env.XRT_TPU_CONFIG: "c_w;0;a:8470|c_w;1;b:8470", env.XRT_LOCAL_WORKER: "c_w:0"}
MAP = {env.XRT_DEVICE_MAP: "TPU:0;/job:w/replica:0/task:0/device:TPU:0"}
WORKERS = {env.XRT_WORKERS: "w:0;grpc://a:8470"}
MESH = {env.XRT_MESH_SERVICE_ADDRESS: "a:8477"}
CORES = {env.TPU_NUM_DEVICES: "4"}
# The environment that a pod's launcher sets on the third of four hosts.
POD_HOST = {
    **MESH,
    env.XRT_LOCAL_WORKER: "c_tpu_worker:2",
    env.XRT_SHARD_WORLD_SIZE: "4",
    env.XRT_SHARD_ORDINAL: "2",
    env.TPU_NUM_DEVICES: "8",
}


def configuration(environ: dict[str, str]) -> Configuration:
    found = read_configuration(environ)
    assert found is not None
    return found


def test_one_worker_with_the_defaults() -> None:
    assert read_configuration(NODE) == Configuration(
        source="XRT_TPU_CONFIG",
        kind="TPU",
        workers=(Worker("tpu_worker", 0, "10.39.209.42", 8470),),
        devices_per_worker=8,
        local_worker=WorkerId("tpu_worker", 0),
        hosts=1,
        mesh_address=None,
        mesh_connect_wait_s=300,
        may_start_service=True,
        warnings=(),
    )


def test_a_pod_as_its_first_host_sees_it() -> None:
    found = configuration(POD | MESH | CORES | {env.XRT_SHARD_WORLD_SIZE: "2", env.XRT_SHARD_ORDINAL: "0"})
    assert [str(worker) for worker in found.workers] == ["c_w;0;a:8470", "c_w;1;b:8470"]
    assert (found.hosts, found.host_index, found.devices_per_worker) == (2, 0, 4)
    assert found.mesh_address == "a:8477"
    assert found.warnings == ()


def test_a_pod_as_another_host_sees_it() -> None:
    found = configuration(POD_HOST)
    assert found == Configuration(
        source="XRT_MESH_SERVICE_ADDRESS",
        kind="TPU",
        workers=(),
        devices_per_worker=8,
        local_worker=WorkerId("c_tpu_worker", 2),
        hosts=4,
        mesh_address="a:8477",
    )
    assert found.host_index == 2


@pytest.mark.parametrize("environ", [{}, {"PJRT_DEVICE": "TPU"}, {env.XRT_TPU_CONFIG: " "}, {"XRT_FOO": "1"}])
def test_no_configuration_without_a_variable_that_describes_workers(environ: dict[str, str]) -> None:
    assert read_configuration(environ) is None


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        (NODE | CORES | MAP | WORKERS | MESH, "XRT_TPU_CONFIG"),
        (CORES | MAP | WORKERS | MESH, "TPU_NUM_DEVICES"),
        (CORES | MESH, "TPU_NUM_DEVICES"),
        (CORES | {env.XRT_LOCAL_WORKER: "localservice:0"}, "TPU_NUM_DEVICES"),
        (
            CORES | MESH | {env.XRT_LOCAL_WORKER: "w:1", env.XRT_SHARD_WORLD_SIZE: "2"},
            "XRT_MESH_SERVICE_ADDRESS",
        ),
        (MAP | WORKERS | MESH, "XRT_DEVICE_MAP"),
        (
            MAP | MESH | {env.XRT_LOCAL_WORKER: "w:1", env.XRT_SHARD_WORLD_SIZE: "2"},
            "XRT_MESH_SERVICE_ADDRESS",
        ),
        (MAP | WORKERS, "XRT_DEVICE_MAP"),
    ],
)
def test_the_precedence_of_sources(environ: dict[str, str], source: str) -> None:
    assert configuration(environ).source == source


def test_a_number_of_cores_alone_means_a_worker_on_this_host() -> None:
    found = configuration(CORES)
    assert found.workers == (Worker("localservice", 0, "localhost", 0),)
    assert found.devices_per_worker == 4
    assert found.starts_service


@pytest.mark.parametrize(
    ("config", "start", "starts"),
    [
        ("localservice;0;localhost:51011", None, True),
        ("localservice;0;localhost:51011", "1", True),
        ("localservice;0;localhost:51011", "0", False),
        ("c_localservice;0;localhost:51011", None, False),
        ("tpu_worker;0;localhost:51011", "1", False),
    ],
)
def test_only_a_worker_named_localservice_is_started(config: str, start: str | None, starts: bool) -> None:
    flag = {} if start is None else {env.XRT_START_LOCAL_SERVER: start}
    assert configuration({env.XRT_TPU_CONFIG: config} | flag).starts_service is starts


def test_a_map_with_its_workers() -> None:
    found = configuration(
        {
            env.XRT_DEVICE_MAP: "CPU:0;/job:localservice/replica:0/task:0/device:XLA_CPU:0",
            env.XRT_WORKERS: "localservice:0;grpc://localhost:40934",
        }
    )
    assert (found.kind, found.devices_per_worker, found.hosts) == ("CPU", 1, 1)
    assert found.workers == (Worker("localservice", 0, "localhost", 40934),)
    assert found.local_worker == WorkerId("localservice", 0)
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("changes", "attribute", "value"),
    [
        ({env.TPU_NUM_DEVICES: "1"}, "devices_per_worker", 1),
        ({env.XRT_MESH_CONNECT_WAIT: "5"}, "mesh_connect_wait_s", 5),
        ({env.XRT_START_LOCAL_SERVER: "false"}, "may_start_service", False),
        ({env.XRT_MESH_SERVICE_ADDRESS: "grpc://[::1]:8477"}, "mesh_address", "[::1]:8477"),
        ({env.XRT_LOCAL_WORKER: "tpu_worker"}, "local_worker", WorkerId("tpu_worker", 0)),
        ({env.XRT_SHARD_WORLD_SIZE: "1", env.XRT_SHARD_ORDINAL: "0"}, "hosts", 1),
    ],
)
def test_each_optional_variable_sets_one_attribute(
    changes: dict[str, str], attribute: str, value: Any
) -> None:
    assert getattr(configuration(NODE | changes), attribute) == value


@pytest.mark.parametrize(
    ("environ", "what", "where", "fix"),
    [
        # The list of workers; test_workers.py and test_addresses.py cover all its errors.
        (
            {env.XRT_TPU_CONFIG: "w;0;:8470"},
            "':8470' has no host",
            "XRT_TPU_CONFIG=w;0;:8470",
            "10.0.0.2:8470",
        ),
        # The local worker.
        (
            NODE | {env.XRT_LOCAL_WORKER: "tpu_worker:1"},
            "tpu_worker:1 is not among the workers tpu_worker:0 of XRT_TPU_CONFIG",
            "XRT_LOCAL_WORKER=tpu_worker:1",
            "unset it to use tpu_worker:0; it may be left over from an earlier run",
        ),
        (
            NODE | {env.XRT_LOCAL_WORKER: "tpu_worker;0"},
            "is not name:task",
            "XRT_LOCAL_WORKER=tpu_worker;0",
            "",
        ),
        (
            MESH,
            "no variable says which worker this host drives",
            "XRT_MESH_SERVICE_ADDRESS=a:8477",
            "Set XRT_LOCAL_WORKER",
        ),
        (
            MESH | {env.XRT_LOCAL_WORKER: "w:0"},
            "this host drives worker 0 and must give the other hosts the list",
            "XRT_LOCAL_WORKER=w:0",
            "set XRT_TPU_CONFIG to the list of all workers",
        ),
        (
            POD_HOST | {env.XRT_SHARD_WORLD_SIZE: "2"},
            "drives c_tpu_worker:2, but with 2 host(s) every task must be below 2",
            "XRT_LOCAL_WORKER=c_tpu_worker:2",
            "Set XRT_SHARD_WORLD_SIZE to the number of hosts, at least 3.",
        ),
        (
            MESH | {env.XRT_LOCAL_WORKER: "w:1"},
            "drives w:1, but with 1 host(s) every task must be below 1",
            "XRT_LOCAL_WORKER=w:1",
            "Set XRT_SHARD_WORLD_SIZE to the number of hosts, at least 2.",
        ),
        # Variables left over from a replica.
        (
            NODE | {env.XRT_MULTI_PROCESSING_DEVICE: "TPU:3"},
            "XRT_MULTI_PROCESSING_DEVICE is set only in a replica's process",
            "XRT_MULTI_PROCESSING_DEVICE=TPU:3",
            "Unset it",
        ),
        (
            NODE | {env.XRT_SHARD_LOCAL_ORDINAL: "0"},
            "XRT_SHARD_LOCAL_ORDINAL is set only in a replica's process",
            "XRT_SHARD_LOCAL_ORDINAL=0",
            "Unset it",
        ),
        (
            NODE | {env.XRT_HOST_WORLD_SIZE: "1"},
            "XRT_HOST_WORLD_SIZE is set only in a replica's process",
            "XRT_HOST_WORLD_SIZE=1",
            "Unset it",
        ),
        (
            NODE | {env.XRT_SHARD_ORDINAL: "3"},
            "this host drives tpu_worker:0, so its index is 0, not 3",
            "XRT_SHARD_ORDINAL=3",
            "Unset it: it is left over",
        ),
        (
            NODE | {env.XRT_HOST_ORDINAL: "0"},
            "hosts whose TPUs are not linked cannot run one job",
            "XRT_HOST_ORDINAL=0",
            "List the workers of a pod in XRT_TPU_CONFIG",
        ),
        # A map without workers, workers without a map, and a map of unknown workers.
        (
            MAP,
            "XRT_DEVICE_MAP needs XRT_WORKERS",
            f"XRT_DEVICE_MAP={MAP[env.XRT_DEVICE_MAP]}",
            "Set both",
        ),
        (
            WORKERS,
            "XRT_WORKERS needs XRT_DEVICE_MAP",
            f"XRT_WORKERS={WORKERS[env.XRT_WORKERS]}",
            "Set both",
        ),
        (
            MAP | {env.XRT_WORKERS: "v:0;a:1"},
            "it names the worker w:0, but XRT_WORKERS lists only v:0",
            f"XRT_DEVICE_MAP={MAP[env.XRT_DEVICE_MAP]}",
            "Add w:0;HOST:8470 to XRT_WORKERS",
        ),
        # The number of cores.
        (
            NODE | {env.TPU_NUM_DEVICES: "0"},
            "'0' is not an integer of at least 1",
            "TPU_NUM_DEVICES=0",
            "such as 8",
        ),
        ({env.TPU_NUM_DEVICES: "-8"}, "'-8' is not an integer of at", "TPU_NUM_DEVICES=-8", "such as 8"),
        # The number of hosts, and values that are not numbers.
        (
            POD | {env.XRT_SHARD_WORLD_SIZE: "3"},
            "3 hosts, but XRT_TPU_CONFIG lists 2 worker(s), one per host",
            "XRT_SHARD_WORLD_SIZE=3",
            "Write XRT_SHARD_WORLD_SIZE=2, or unset it.",
        ),
        (
            NODE | {env.XRT_SHARD_WORLD_SIZE: "8"},
            "8 hosts (the number of replicas: is it left over from a replica?), but XRT_TPU_CONFIG lists 1",
            "XRT_SHARD_WORLD_SIZE=8",
            "Write XRT_SHARD_WORLD_SIZE=1",
        ),
        (
            MAP | WORKERS | {env.XRT_SHARD_WORLD_SIZE: "2"},
            "2 hosts, but XRT_DEVICE_MAP lists 1 worker(s)",
            "XRT_SHARD_WORLD_SIZE=2",
            "Write XRT_SHARD_WORLD_SIZE=1",
        ),
        (
            NODE | {env.TPU_NUM_DEVICES: "eight"},
            "'eight' is not an integer",
            "TPU_NUM_DEVICES=eight",
            "number of cores",
        ),
        (
            NODE | {env.XRT_SHARD_WORLD_SIZE: "x"},
            "'x' is not an integer",
            "XRT_SHARD_WORLD_SIZE=x",
            "number of hosts",
        ),
        (POD_HOST | {env.XRT_SHARD_WORLD_SIZE: "0"}, "'0' is not an integer", "XRT_SHARD_WORLD_SIZE=0", ""),
        (
            NODE | {env.XRT_SHARD_ORDINAL: "x"},
            "'x' is not an integer",
            "XRT_SHARD_ORDINAL=x",
            "index of this host",
        ),
        (NODE | {env.XRT_MESH_CONNECT_WAIT: "0"}, "'0' is not an", "XRT_MESH_CONNECT_WAIT=0", "seconds"),
        (NODE | {env.XRT_START_LOCAL_SERVER: "no"}, "'no' is neither", "XRT_START_LOCAL_SERVER=no", ""),
        (
            NODE | {env.XRT_MESH_SERVICE_ADDRESS: "a"},
            "no port after 'a'",
            "XRT_MESH_SERVICE_ADDRESS=a",
            "a:8470",
        ),
    ],
)
def test_each_misconfiguration_names_the_variable_and_the_fix(
    environ: dict[str, str], what: str, where: str, fix: str
) -> None:
    with pytest.raises(UsageError) as wrong:
        read_configuration(environ)
    assert what in wrong.value.what
    assert wrong.value.where == where
    assert fix in wrong.value.fix


@pytest.mark.parametrize(
    ("environ", "warnings"),
    [
        (
            NODE | MAP | WORKERS,
            [
                "XRT_DEVICE_MAP has no effect because XRT_TPU_CONFIG is set: unset one of them.",
                "XRT_WORKERS has no effect because XRT_TPU_CONFIG is set: unset one of them.",
            ],
        ),
        (NODE | MAP, ["XRT_DEVICE_MAP has no effect because XRT_TPU_CONFIG is set: unset one of them."]),
        (
            {env.XRT_TPU_CONFIG: "w;0;grpc://a:1"},
            ["XRT_TPU_CONFIG contains grpc://, which is ignored: write the address without it."],
        ),
        (
            NODE | {env.XRT_MESH_SERVICE_ADDRESS: "grpc://a:1"},
            ["XRT_MESH_SERVICE_ADDRESS contains grpc://, which is ignored: write the address without it."],
        ),
        (
            {env.XRT_TPU_CONFIG: POD[env.XRT_TPU_CONFIG]},
            ["XRT_LOCAL_WORKER is not set, so this host drives c_w:0, the first of 2 workers."],
        ),
        (
            NODE | {"XRT_TPU_CONFG": "", "XRT_GRPC_COMPRESSION": "gzip"},
            [
                (
                    "XRT_GRPC_COMPRESSION has no effect: it tuned TensorFlow sessions, "
                    "which this runtime does not use."
                ),
                "XRT_TPU_CONFG is not an XRT variable and has no effect. Did you mean XRT_TPU_CONFIG?",
            ],
        ),
    ],
)
def test_warnings(environ: dict[str, str], warnings: list[str]) -> None:
    assert list(configuration(environ).warnings) == warnings


values = st.one_of(
    st.text(max_size=20),
    st.integers(-2, 9).map(str),
    st.sampled_from(
        [
            "w;0;a:1",
            "w;0;a:1|w;1;b:2",
            "w:0",
            "w:1",
            "w",
            "a:1",
            "w:0;a:1|w:1;b:1",
            MAP[env.XRT_DEVICE_MAP],
            WORKERS[env.XRT_WORKERS],
            "true",
        ]
    ),
)


def outcome(environ: dict[str, str]) -> Configuration | UsageError | None:
    try:
        return read_configuration(environ)
    except UsageError as wrong:
        return wrong


@given(environ=st.dictionaries(st.sampled_from(sorted(env.KNOWN)), values, max_size=8))
def test_any_environment_is_parsed_or_is_a_usage_error(environ: dict[str, str]) -> None:
    found = outcome(environ)
    if isinstance(found, UsageError):
        name, _, text = (found.where or "").partition("=")
        assert environ[name].strip() == text
        return
    assert found is None or 0 <= found.host_index < found.hosts
