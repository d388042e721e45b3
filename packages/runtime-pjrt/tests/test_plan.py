"""The plans of jobs and the environment of their processes; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from polyxla import UsageError
from polyxla.plugin import POLYXLA_DEVICES, Layout, tpu_env
from polyxla_bridge.env import POLYXLA_LIBTPU_DEV, POLYXLA_LIBTPU_HOST, from_environ
from polyxla_pjrt import env
from polyxla_pjrt.discovery import discover, prepared_plan, requested_devices
from polyxla_pjrt.plan import (
    PjrtPlan,
    TpuPlan,
    core_environment,
    cpu_layout,
    plan_cores,
    plan_for,
    replica_environment,
)

TORCHRUN = {
    tpu_env.TORCHELASTIC_RUN_ID: "a",
    tpu_env.WORLD_SIZE: "4",
    tpu_env.LOCAL_WORLD_SIZE: "4",
    tpu_env.RANK: "1",
}


def tpu_plan(name: str, devices: Sequence[int] = (), **environ: str) -> TpuPlan:
    """Plan a job on some devices of an emulated TPU, or on all."""
    environ = {tpu_env.POLYXLA_EMULATE: name, **environ}
    return plan_cores(environ, tuple(devices) or requested_devices(environ))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("v2-8", Layout(threads=2, processes=4)),
        ("v3-8", Layout(threads=2, processes=4)),
        ("v3-32", Layout(threads=2, processes=4, hosts=4)),
        ("v4-8", Layout(threads=1, processes=4)),
        ("v4-16", Layout(threads=1, processes=4, hosts=2)),
        ("v5e-8", Layout(threads=1, processes=8)),
        ("v5litepod-16", Layout(threads=1, processes=4, hosts=4)),
        ("v6e-1", Layout()),
    ],
)
def test_all_devices_of_a_slice_get_the_layout_of_a_tpu(name: str, layout: Layout) -> None:
    plan = tpu_plan(name)
    assert plan.layout == layout
    assert plan.processes_here == range(layout.process_count)


@pytest.mark.parametrize(
    ("name", "devices", "layout"),
    [
        ("v3-8", [0, 1], Layout(threads=2)),
        ("v3-8", [4, 5, 6, 7], Layout(threads=2, processes=2)),
        ("v4-8", [0, 2], Layout(processes=2)),
    ],
)
def test_some_devices_of_a_slice_get_a_layout(name: str, devices: list[int], layout: Layout) -> None:
    assert tpu_plan(name, devices).layout == layout


@pytest.mark.parametrize("devices", [[1, 3], [0, 1, 2]])
def test_one_of_a_chips_two_cores_beside_other_chips_is_refused(devices: list[int]) -> None:
    with pytest.raises(UsageError) as caught:
        tpu_plan("v3-8", devices)
    assert str(caught.value) == (
        f"the cores {devices} are not whole chips, which have 2 cores each (from devices). "
        "Take both cores of each chip, such as devices=[0, 1]; runtime 'pjrt' can use a single core."
    )


@pytest.mark.parametrize(
    ("count", "processes", "layout"),
    [
        (4, None, Layout(processes=4)),
        (4, "", Layout(processes=4)),
        (4, "1", Layout(threads=4)),
        (4, "2", Layout(threads=2, processes=2)),
    ],
)
def test_cpu_replicas_are_processes_unless_a_variable_sets_their_number(
    count: int, processes: str | None, layout: Layout
) -> None:
    environ = {} if processes is None else {env.POLYXLA_PJRT_PROCESSES: processes}
    assert cpu_layout(count, environ) == layout


@pytest.mark.parametrize("text", ["3", "0", "-1", "8", "two", "²"])
def test_processes_that_cannot_share_equally_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        cpu_layout(4, {env.POLYXLA_PJRT_PROCESSES: text})
    assert str(caught.value) == (
        f"{text} processes cannot share 4 replicas equally (from POLYXLA_PJRT_PROCESSES={text}). "
        "Write one of 1, 2, 4, or unset it for one process per replica."
    )


FOUR = {env.PJRT_DEVICE: "CPU_POLYXLA", POLYXLA_DEVICES: "4"}


@pytest.mark.parametrize(
    ("environ", "nprocs", "layout"),
    [
        pytest.param({env.PJRT_DEVICE: "CPU"}, 8, Layout(processes=8), id="cpu"),
        pytest.param(
            {env.PJRT_DEVICE: "CPU_POLYXLA", POLYXLA_DEVICES: "4"}, 4, Layout(processes=4), id="asked"
        ),
        pytest.param({tpu_env.POLYXLA_EMULATE: "v3-8"}, 8, Layout(threads=2, processes=4), id="emulated"),
        pytest.param({env.PJRT_DEVICE: "CPU"}, 1, None, id="one"),
        pytest.param({env.PJRT_DEVICE: "TPU_XRT"}, 8, None, id="another-runtimes"),
    ],
)
def test_a_program_can_name_the_number_of_replicas(
    environ: dict[str, str], nprocs: int, layout: Layout | None
) -> None:
    environ = {env.PJRT_DEVICE: "TPU", **environ}
    plan = prepared_plan(environ, nprocs)
    assert (plan.layout if plan else None) == layout


@pytest.mark.parametrize(
    ("environ", "nprocs", "count"),
    [
        pytest.param(FOUR, 8, 4, id="asked"),
        pytest.param({env.PJRT_DEVICE: "CPU", env.CPU_NUM_DEVICES: "2"}, 8, 2, id="fixed"),
        pytest.param({tpu_env.POLYXLA_EMULATE: "v3-8", env.PJRT_DEVICE: "TPU"}, 4, 8, id="emulated"),
    ],
)
def test_a_number_of_replicas_that_is_not_available_is_refused(
    environ: dict[str, str], nprocs: int, count: int
) -> None:
    with pytest.raises(UsageError) as caught:
        prepared_plan(environ, nprocs)
    assert str(caught.value) == (
        f"the program asks for {nprocs} replicas, but there are {count} devices here (from nprocs={nprocs}). "
        f"Write nprocs={count}, or leave it out to use all of them."
    )


@pytest.mark.parametrize(
    ("plan", "layout"),
    [
        (PjrtPlan(Layout(processes=2)), Layout(processes=2)),
        (PjrtPlan(Layout(2, 3)), Layout(1, 6)),
        (tpu_plan("v4-8"), Layout(1, 4)),
    ],
)
def test_each_replica_can_have_a_process_of_its_own(plan: PjrtPlan, layout: Layout) -> None:
    assert plan.with_own_processes().layout == layout


def test_the_cores_of_a_chip_cannot_have_a_process_each() -> None:
    with pytest.raises(UsageError, match="the 2 cores of a chip are replicas of one process"):
        tpu_plan("v3-8").with_own_processes()


def test_each_process_gets_its_share_and_one_coordinator() -> None:
    job = {"KEPT": "yes", "POLYXLA_SECRET": "of one job"}
    environs = PjrtPlan(Layout(threads=2, processes=2)).process_environments(job, cpu_count=2)
    shares = [from_environ(own) for own in environs]
    assert [share.local for share in shares] == [(0, 1), (2, 3)]
    assert (
        len({share.coordinator for share in shares})
        == len({own[tpu_env.MASTER_PORT] for own in environs})
        == 1
    )
    assert [own[env.PJRT_LOCAL_PROCESS_RANK] for own in environs] == ["0", "1"]
    assert {own["KEPT"] for own in environs} == {"yes"}


def pod_plan(host: int) -> TpuPlan:
    """Plan a job on one host of an emulated pod."""
    addresses = "127.1.1.1,127.1.1.2"
    return tpu_plan("v4-16", POLYXLA_EMULATE_HOST=str(host), TPU_WORKER_HOSTNAMES=addresses)


def test_a_launch_emulates_all_hosts_of_a_tpu() -> None:
    environs = tpu_plan("v4-16").process_environments({"KEPT": "yes"}, cpu_count=2)
    assert [own[env.PJRT_LOCAL_PROCESS_RANK] for own in environs] == ["0", "1", "2", "3"] * 2
    assert [own[tpu_env.POLYXLA_EMULATE_HOST] for own in environs] == ["0"] * 4 + ["1"] * 4
    assert [own[tpu_env.CLOUD_TPU_TASK_ID] for own in environs] == [str(index) for index in range(8)]
    assert {own[tpu_env.TPU_PROCESS_BOUNDS] for own in environs} == {"2,2,2"}
    assert {own[tpu_env.TPU_SKIP_MDS_QUERY] for own in environs} == {"1"}
    assert {own[POLYXLA_LIBTPU_HOST] for own in environs} == {"v4:2x2x1"}
    assert len({own[POLYXLA_LIBTPU_DEV] for own in environs}) == 2, "each host has its own chips"
    (addresses,) = {own[tpu_env.TPU_PROCESS_ADDRESSES] for own in environs}
    assert len(set(addresses.split(","))) == 8
    ports = [address.rpartition(":")[2] for address in addresses.split(",")]
    assert (
        ports == [own[tpu_env.TPU_PROCESS_PORT] for own in environs] == ["8476", "8477", "8478", "8479"] * 2
    )
    assert {own["KEPT"] for own in environs} == {"yes"}


def test_a_launch_can_emulate_one_host_of_a_tpu() -> None:
    plan = pod_plan(1)
    assert (plan.layout, plan.processes_here) == (Layout(1, 4, 2), range(4, 8))
    environs = plan.process_environments({}, cpu_count=2)
    assert [own[tpu_env.CLOUD_TPU_TASK_ID] for own in environs] == ["4", "5", "6", "7"]
    (addresses,) = {own[tpu_env.TPU_PROCESS_ADDRESSES] for own in environs}
    hosts = [address.partition(":")[0] for address in addresses.split(",")]
    assert hosts == ["127.1.1.1"] * 4 + ["127.1.1.2"] * 4


def test_a_launch_emulates_all_slices_of_a_job() -> None:
    environs = tpu_plan("2xv4-8").process_environments({}, cpu_count=2)
    assert [own[tpu_env.CLOUD_TPU_TASK_ID] for own in environs] == ["0", "1", "2", "3"] * 2
    assert [own[tpu_env.MEGASCALE_SLICE_ID] for own in environs] == ["0"] * 4 + ["1"] * 4
    assert [own[tpu_env.MEGASCALE_PORT] for own in environs] == ["8080", "8082", "8084", "8086"] * 2
    assert {own[tpu_env.MEGASCALE_NUM_SLICES] for own in environs} == {"2"}
    first, second = dict.fromkeys(own[tpu_env.TPU_PROCESS_ADDRESSES] for own in environs)
    assert len({*first.split(","), *second.split(",")}) == 8
    (coordinator,) = {own[tpu_env.MEGASCALE_COORDINATOR_ADDRESS] for own in environs}
    assert coordinator == f"{first.partition(':')[0]}:8080"


def test_a_launch_knows_the_hosts_of_its_own_slice_and_the_first() -> None:
    plan = tpu_plan(
        "2xv4-16",
        POLYXLA_EMULATE_HOST="3",
        TPU_WORKER_HOSTNAMES="127.1.1.3,127.1.1.4",
        MEGASCALE_COORDINATOR_ADDRESS="127.1.1.1:8080",
    )
    assert (plan.layout, plan.own_host, plan.slices) == (Layout(1, 4, 4), 3, 2)
    assert (plan.processes_here, plan.first_process) == (range(12, 16), 12)
    assert plan.launching_hosts == ("127.1.1.1", "", "127.1.1.3", "127.1.1.4")
    environs = plan.process_environments({}, cpu_count=2)
    assert [own[tpu_env.CLOUD_TPU_TASK_ID] for own in environs] == ["4", "5", "6", "7"]
    assert {own[tpu_env.MEGASCALE_COORDINATOR_ADDRESS] for own in environs} == {"127.1.1.1:8080"}


def test_slices_that_meet_by_torchrun_have_their_own_addresses() -> None:
    # One process chooses for those of all hosts.
    plans = [
        tpu_plan(
            "2xv4-8",
            POLYXLA_EMULATE_HOST=str(host),
            TPU_WORKER_HOSTNAMES=f"127.1.1.{host + 1}",
            MEGASCALE_COORDINATOR_ADDRESS="127.1.1.1:8080",
        )
        for host in range(2)
    ]
    meeting = plans[0].meeting({})
    for host, plan in enumerate(plans):
        own = plan.process_environment(plan.first_process, 2, meeting)
        hosts = {address.partition(":")[0] for address in own[tpu_env.TPU_PROCESS_ADDRESSES].split(",")}
        assert hosts == {f"127.1.1.{host + 1}"}
        assert own[tpu_env.MEGASCALE_SLICE_ID] == str(host)


def test_a_single_core_waits_for_no_other_slice() -> None:
    environ = {"POLYXLA_EMULATE": "2xv4-8"}
    assert core_environment(environ, 1)[tpu_env.SKIP_MEGASCALE_PJRT_CLIENT] == "true"
    assert tpu_env.SKIP_MEGASCALE_PJRT_CLIENT not in core_environment({"POLYXLA_EMULATE": "v4-8"}, 1)


def test_the_threads_of_a_program_are_for_the_devices_of_its_host() -> None:
    plan = tpu_plan("v5e-256", POLYXLA_EMULATE_HOST="1")
    program = plan.program_environment({}, 2)
    assert (program[env.XLA_THREAD_POOL_SIZE], program[tpu_env.NPROC]) == ("16", "1")


def test_launches_of_one_program_share_the_chips_of_its_host() -> None:
    plan = tpu_plan("v4-8")
    program = plan.program_environment({}, 2)
    environs = plan.process_environments(program, 2) + plan.process_environments(program, 2)
    assert {own[POLYXLA_LIBTPU_DEV] for own in environs} == {program[POLYXLA_LIBTPU_DEV]}
    assert len({own[tpu_env.TPU_PROCESS_ADDRESSES] for own in environs}) == 2
    assert plan.program_environment({}, 2)[POLYXLA_LIBTPU_DEV] != program[POLYXLA_LIBTPU_DEV]


def test_hosts_that_meet_have_their_own_chips() -> None:
    # Under torchrun one process chooses for those of all hosts.
    first, second = pod_plan(0), pod_plan(1)
    program = second.program_environment({}, 2)
    meeting = second.meeting(program)
    chips = {
        plan.process_environment(process, 2, meeting)[POLYXLA_LIBTPU_DEV]
        for plan in (first, second)
        for process in plan.processes_here
    }
    assert len(chips) == 2
    assert program[POLYXLA_LIBTPU_DEV] in chips


def test_two_launches_use_different_ports() -> None:
    plan = PjrtPlan(Layout(processes=2))
    (one, _), (other, _) = plan.process_environments({}, 2), plan.process_environments({}, 2)
    assert one["POLYXLA_BRIDGE_COORDINATOR"] != other["POLYXLA_BRIDGE_COORDINATOR"]


@pytest.mark.parametrize(
    ("layout", "waiting", "compute"),
    [(Layout(), 4, 3), (Layout(threads=8), 32, 1), (Layout(processes=8), 4, 1), (Layout(threads=2), 8, 1)],
)
def test_thread_pools_hold_every_waiting_replica_and_share_the_cores(
    layout: Layout, waiting: int, compute: int
) -> None:
    environs = PjrtPlan(layout).process_environments({}, cpu_count=3)[0]
    assert int(environs[env.XLA_THREAD_POOL_SIZE]) >= waiting
    assert int(environs[tpu_env.NPROC]) == compute


def test_an_emulated_tpu_is_discovered_as_one(tmp_path: Path) -> None:
    environ = {tpu_env.POLYXLA_EMULATE: "v3-8"}
    found = discover(environ, "auto", tmp_path)
    assert (found.kind, found.topology, found.host_count, len(found.devices)) == ("TPU", "v3-8", 1, 8)
    assert found.reason == "POLYXLA_EMULATE=v3-8"
    assert found.devices[7].name == "emulated v3-8 chip 3 core 1"
    assert discover(environ, "tpu", tmp_path).unavailable is None
    prepared = environ | replica_environment(environ, found, (0, 1))
    assert prepared[env.PJRT_DEVICE] == "TPU"
    # The launch in the script reads the environment that `polyxla run` has prepared.
    again = discover(prepared, "auto", tmp_path)
    assert (again.kind, len(again.devices)) == ("TPU", 8)
    plan = plan_for(prepared, again.kind, (0, 1))
    assert plan is not None
    assert (plan.kind, plan.layout, plan.is_bridged) == ("TPU", Layout(threads=2), True)


def test_one_core_needs_no_plan() -> None:
    assert plan_for({tpu_env.POLYXLA_EMULATE: "v4-8"}, "TPU", (2,)) is None
    assert plan_for({}, "CPU", (0,)) is None


@pytest.mark.parametrize(("environ", "count"), [({}, "4"), ({env.CPU_NUM_DEVICES: "8"}, "8")])
def test_a_program_for_several_cpu_devices_keeps_the_client_of_torch_xla(
    environ: dict[str, str], count: str, tmp_path: Path
) -> None:
    found = discover(environ, "auto", tmp_path)
    prepared = environ | replica_environment(environ, found, (0, 1, 2, 3))
    assert prepared == {env.PJRT_DEVICE: "CPU", env.CPU_NUM_DEVICES: count}
    # The launch in the program reads what `polyxla run` has prepared.
    assert plan_for(prepared, "CPU", (0, 1, 2, 3)) == PjrtPlan(Layout(processes=4))


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({tpu_env.POLYXLA_EMULATE: "v9-8"}, "there is no TPU type 'v9-8'"),
        ({tpu_env.POLYXLA_EMULATE: "v3-9"}, "TPU v3 does not come with 9 cores"),
        (
            {tpu_env.POLYXLA_EMULATE: "v3-8", env.PJRT_DEVICE: "CPU"},
            "POLYXLA_EMULATE=v3-8 and PJRT_DEVICE=CPU contradict each other",
        ),
        ({"POLYXLA_EMULATE_NUMERICS": "tpu"}, "POLYXLA_EMULATE_NUMERICS=tpu is for an emulated TPU, and"),
    ],
)
def test_an_emulation_of_an_unknown_type_or_beside_the_cpu_is_refused(
    environ: dict[str, str], text: str, tmp_path: Path
) -> None:
    assert text in str(discover(environ, "auto", tmp_path).unavailable)


def test_processes_of_torchrun_are_the_replicas() -> None:
    assert requested_devices(TORCHRUN) == (0, 1, 2, 3)
    assert plan_for(TORCHRUN, "CPU", (0, 1, 2, 3)) == PjrtPlan(Layout(processes=4))
    # Two threads in each of its four.
    assert plan_for(TORCHRUN, "CPU", tuple(range(8))) == PjrtPlan(Layout(threads=2, processes=4))


@pytest.mark.parametrize(
    ("environ", "devices", "text"),
    [
        (TORCHRUN, 1, "4 processes cannot share 1 replicas equally"),
        (TORCHRUN, 2, "4 processes cannot share 2 replicas equally"),
        (
            TORCHRUN | {env.POLYXLA_PJRT_PROCESSES: "2"},
            4,
            (
                "torchrun has started 4 processes, but 4 replicas here are 2 processes x 2 threads "
                "(from WORLD_SIZE=4). Write torchrun --nproc-per-node 2."
            ),
        ),
        (
            TORCHRUN | {tpu_env.POLYXLA_EMULATE: "v5e-8"},
            8,
            (
                "torchrun has started 4 processes, but 8 replicas here are 8 processes x 1 threads "
                "(from WORLD_SIZE=4). Write torchrun --nproc-per-node 8."
            ),
        ),
        (
            TORCHRUN | {tpu_env.LOCAL_WORLD_SIZE: "2"},
            4,
            "torchrun has started 2 of 4 processes on this host",
        ),
    ],
)
def test_a_torchrun_with_another_number_of_processes_is_refused(
    environ: dict[str, str], devices: int, text: str
) -> None:
    kind = "TPU" if tpu_env.POLYXLA_EMULATE in environ else "CPU"
    with pytest.raises(UsageError) as caught:
        plan_for(environ, kind, tuple(range(devices)))
    assert text in str(caught.value)
