"""The environment and the world of each process of a job, as XRT's own launcher set them."""

from __future__ import annotations

import pytest

from polyxla import UsageError
from polyxla.plugin import World
from polyxla_xrt import env
from polyxla_xrt.config.assignment import read_assignment
from polyxla_xrt.config.configuration import Configuration, read_configuration
from polyxla_xrt.config.cores import all_cores, child_environment, child_world, process_count
from polyxla_xrt.config.workers import WorkerId
from polyxla_xrt.plan import plan_for

NODE = {env.XRT_TPU_CONFIG: "tpu_worker;0;10.0.0.2:8470"}
CONFIG = "|".join(f"c_w;{task};10.0.0.{task}:8470" for task in range(4))
MESH = {env.XRT_MESH_SERVICE_ADDRESS: "10.0.0.9:8477"}
FIRST_HOST = {env.XRT_TPU_CONFIG: CONFIG, env.XRT_LOCAL_WORKER: "c_w:0", **MESH}
# A pod's launcher sets these variables on later hosts, without the list of workers.
THIRD_HOST = {env.XRT_LOCAL_WORKER: "c_w:2", env.XRT_SHARD_WORLD_SIZE: "4", env.TPU_NUM_DEVICES: "8", **MESH}
MAP = {
    env.XRT_DEVICE_MAP: "|".join(f"TPU:{n};/job:w/replica:0/task:0/device:TPU:{n}" for n in range(2)),
    env.XRT_WORKERS: "w:0;a:8470",
}


def configuration(environ: dict[str, str]) -> Configuration:
    found = read_configuration(environ)
    assert found is not None
    return found


def numbers(world: World) -> tuple[int, int, int]:
    return world.ordinal, world.local_ordinal, world.world_size


@pytest.mark.parametrize("index", range(8))
def test_the_environment_of_eight_processes_of_a_node(index: int) -> None:
    expected: dict[str, str | None] = {
        "XRT_MULTI_PROCESSING_DEVICE": f"TPU:{index}",
        "XRT_SHARD_ORDINAL": str(index),
        "XRT_SHARD_LOCAL_ORDINAL": str(index),
        "XRT_SHARD_WORLD_SIZE": "8",
        "XRT_HOST_WORLD_SIZE": "1",
        "XRT_LOCAL_WORKER": "tpu_worker:0",
        "XRT_DEVICE_MAP": None,
        "XRT_WORKERS": None,
        "XRT_MESH_SERVICE_ADDRESS": "10.0.0.9:8477",
    }
    if index:
        expected |= {"XRT_TPU_CONFIG": None, "TPU_NUM_DEVICES": None}
    assert child_environment(configuration(NODE | MESH), index, 8) == expected


def test_the_launcher_may_choose_the_mesh_address_of_one_host() -> None:
    assert env.XRT_MESH_SERVICE_ADDRESS not in child_environment(configuration(NODE), 3, 8)


def test_a_single_process_has_no_mesh_address() -> None:
    assert child_environment(configuration(NODE | MESH), 0, 1) == {
        "XRT_MULTI_PROCESSING_DEVICE": "TPU:0",
        "XRT_SHARD_ORDINAL": "0",
        "XRT_SHARD_LOCAL_ORDINAL": "0",
        "XRT_SHARD_WORLD_SIZE": "1",
        "XRT_HOST_WORLD_SIZE": "1",
        "XRT_LOCAL_WORKER": "tpu_worker:0",
        "XRT_DEVICE_MAP": None,
        "XRT_WORKERS": None,
        "XRT_MESH_SERVICE_ADDRESS": None,
    }


def test_a_process_finds_its_core_no_attached_tpu_and_the_jobs_store() -> None:
    plan = plan_for(configuration(NODE), range(8))
    environs = plan.process_environments({"KEPT": "1"}, "10.0.0.2:8470", "the job", "10.0.0.9:8477")
    for index, process in enumerate(environs):
        assert (process["KEPT"], process[env.PJRT_DEVICE]) == ("1", "TPU_XRT")
        assert process[env.XRT_MESH_SERVICE_ADDRESS] == "10.0.0.9:8477"
        assignment = read_assignment(process)
        assert assignment is not None
        assert (assignment.address, assignment.job) == ("10.0.0.2:8470", "the job")
        assert (assignment.cores, assignment.ordinal, assignment.world_size) == ((index,), index, 8)
        assert int(process[env.XLA_THREAD_POOL_SIZE]) >= 4
        assert (process[env.TPU_SKIP_MDS_QUERY], process[env.TPU_ACCELERATOR_TYPE]) == ("1", "v3-8")
        assert (process[env.TPU_PROCESS_BOUNDS], process[env.TPU_CHIPS_PER_PROCESS_BOUNDS]) == (
            "1,1,1",
            "2,2,1",
        )
        assert (process[env.TPU_WORKER_ID], process[env.TPU_WORKER_HOSTNAMES]) == ("0", "localhost")
    stores = {(process[env.MASTER_ADDR], process[env.MASTER_PORT]) for process in environs}
    assert len(stores) == 1
    assert stores.pop()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("described", "environ"), [(NODE, {env.MASTER_PORT: "7"}), (FIRST_HOST, {})], ids=["set", "several-hosts"]
)
def test_a_store_that_the_user_may_choose_is_not_chosen(
    described: dict[str, str], environ: dict[str, str]
) -> None:
    plan = plan_for(configuration(described), range(8 * configuration(described).hosts))
    for process in plan.process_environments(environ, "a:1", "the job", "b:2"):
        assert {
            name: process[name] for name in (env.MASTER_ADDR, env.MASTER_PORT) if name in process
        } == environ


@pytest.mark.parametrize(
    ("environ", "index", "device", "ordinal", "describes"),
    [
        (FIRST_HOST, 0, "TPU:0", "0", True),
        (FIRST_HOST, 1, "TPU:1", "1", False),
        (THIRD_HOST, 0, "TPU:16", "16", False),
        (THIRD_HOST, 7, "TPU:23", "23", False),
        (FIRST_HOST | {env.XRT_LOCAL_WORKER: "c_w:2"}, 0, "TPU:16", "16", False),
    ],
)
def test_the_environment_of_a_process_of_a_pod(
    environ: dict[str, str], index: int, device: str, ordinal: str, describes: bool
) -> None:
    given = child_environment(configuration(environ), index, 8)
    assert given["XRT_MULTI_PROCESSING_DEVICE"] == device
    assert given["XRT_SHARD_ORDINAL"] == ordinal
    assert given["XRT_SHARD_LOCAL_ORDINAL"] == str(index)
    assert given["XRT_SHARD_WORLD_SIZE"] == "32"
    assert given["XRT_HOST_WORLD_SIZE"] == "4"
    assert given["XRT_LOCAL_WORKER"] == environ[env.XRT_LOCAL_WORKER]
    assert given["XRT_MESH_SERVICE_ADDRESS"] == "10.0.0.9:8477"
    assert ("XRT_TPU_CONFIG" not in given) is describes
    assert ("TPU_NUM_DEVICES" not in given) is describes


def test_a_process_keeps_the_map_that_describes_its_worker() -> None:
    given = child_environment(configuration(MAP), 0, 1)
    assert env.XRT_DEVICE_MAP not in given
    assert env.XRT_WORKERS not in given


def test_the_world_of_a_process() -> None:
    assert child_world(configuration(THIRD_HOST), 1, 8) == World(
        world_size=32,
        ordinal=17,
        local_ordinal=1,
        local_world_size=8,
        process_index=17,
        process_count=32,
        host_index=2,
        host_count=4,
    )
    assert numbers(child_world(configuration(NODE), 7, 8)) == (7, 7, 8)
    assert child_world(configuration(NODE), 0, 1) == World()


@pytest.mark.parametrize(("index", "count"), [(8, 8), (-1, 8), (1, 1)])
def test_a_process_index_out_of_range_is_an_error(index: int, count: int) -> None:
    with pytest.raises(ValueError, match=rf"index={index} is not in 0 <= index < count={count}"):
        child_world(configuration(NODE), index, count)


@pytest.mark.parametrize(
    ("environ", "nprocs", "count"),
    [
        (NODE, None, 8),
        (NODE, 8, 8),
        (NODE, 1, 1),
        (NODE | {env.TPU_NUM_DEVICES: "2"}, 2, 2),
        (NODE | {env.TPU_NUM_DEVICES: "1"}, None, 1),
        (THIRD_HOST, None, 8),
        (THIRD_HOST | {env.TPU_NUM_DEVICES: "1"}, 1, 1),
        ({env.TPU_NUM_DEVICES: "8"}, 1, 1),
        ({env.TPU_NUM_DEVICES: "1"}, None, 1),
        (MAP, 1, 1),
    ],
)
def test_a_host_starts_one_process_or_one_per_core(
    environ: dict[str, str], nprocs: int | None, count: int
) -> None:
    assert process_count(configuration(environ), nprocs) == count


NO_MEETING = {name: value for name, value in FIRST_HOST.items() if name not in MESH}


@pytest.mark.parametrize(
    ("environ", "nprocs", "what", "where", "fix"),
    [
        (
            NODE,
            4,
            "4 processes cannot share 8 core(s)",
            "nprocs=4",
            (
                "Write nprocs=1 or nprocs=8, or omit it to use all cores; "
                "TPU_NUM_DEVICES sets the number of cores."
            ),
        ),
        (NODE, 0, "0 processes cannot share 8", "nprocs=0", "Write nprocs=1 or nprocs=8"),
        (NODE, -1, "-1 processes cannot share 8", "nprocs=-1", "Write nprocs=1 or nprocs=8"),
        (
            NODE | {env.TPU_NUM_DEVICES: "1"},
            8,
            "8 processes cannot share 1",
            "nprocs=8",
            "Write nprocs=1, or",
        ),
        (MAP, 3, "3 processes cannot share 2", "nprocs=3", "XRT_DEVICE_MAP sets the number of cores"),
        (
            THIRD_HOST,
            1,
            "one process cannot drive the 8 cores of a host in a job of 4 hosts",
            "nprocs=1",
            "Omit nprocs, or write nprocs=8.",
        ),
        (
            MAP,
            None,
            "XRT_DEVICE_MAP describes the devices of one process, not of several",
            "nprocs",
            'Set XRT_TPU_CONFIG="w;0;a:8470" and TPU_NUM_DEVICES=2, or write nprocs=1.',
        ),
        (
            {env.TPU_NUM_DEVICES: "4"},
            4,
            "TPU_NUM_DEVICES describes the devices of one process",
            "nprocs=4",
            'Set XRT_TPU_CONFIG="localservice;0;localhost:51011" and TPU_NUM_DEVICES=4',
        ),
        (
            NO_MEETING,
            None,
            "4 hosts need the address of the mesh service",
            "XRT_MESH_SERVICE_ADDRESS is unset",
            "Set XRT_MESH_SERVICE_ADDRESS=HOST:8477 on every host",
        ),
    ],
)
def test_an_invalid_number_of_processes_is_a_usage_error(
    environ: dict[str, str], nprocs: int | None, what: str, where: str, fix: str
) -> None:
    with pytest.raises(UsageError) as wrong:
        process_count(configuration(environ), nprocs)
    assert what in wrong.value.what
    assert wrong.value.where == where
    assert fix in wrong.value.fix


def test_the_suggested_fix_for_a_map_is_a_valid_configuration() -> None:
    found = configuration({env.XRT_TPU_CONFIG: "w;0;a:8470", env.TPU_NUM_DEVICES: "2"})
    assert process_count(found) == 2


@pytest.mark.parametrize("environ", [FIRST_HOST, THIRD_HOST])
def test_cores_are_numbered_worker_by_worker(environ: dict[str, str]) -> None:
    found = all_cores(configuration(environ))
    assert [core.name for core in found] == [f"TPU:{ordinal}" for ordinal in range(32)]
    assert [core.ordinal for core in found] == list(range(32))
    assert [core.worker for core in found[15:17]] == [WorkerId("c_w", 1), WorkerId("c_w", 2)]
    assert [core.index for core in found[15:17]] == [7, 0]


def test_a_maps_kind_names_its_cores() -> None:
    environ = {
        env.XRT_DEVICE_MAP: "CPU:0;/job:w/replica:0/task:0/device:XLA_CPU:0",
        env.XRT_WORKERS: "w:0;a:1",
    }
    assert [core.name for core in all_cores(configuration(environ))] == ["CPU:0"]
    assert child_environment(configuration(environ), 0, 1)["XRT_MULTI_PROCESSING_DEVICE"] == "CPU:0"


def test_a_job_of_several_hosts_uses_all_cores() -> None:
    found = configuration(FIRST_HOST | {env.TPU_NUM_DEVICES: "2"})
    assert plan_for(found, range(8)).cores == 2
    with pytest.raises(UsageError, match="a job of 4 hosts must use all 8 cores, not 4 of them"):
        plan_for(found, range(4))
