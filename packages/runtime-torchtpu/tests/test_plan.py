"""The variables of a launch; compared with those of TorchTPU's own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from polyxla.plugin import POLYXLA_EMULATE
from polyxla.plugin import tpu_env as tpu
from polyxla_torchtpu import env
from polyxla_torchtpu.discovery import requested_plan
from polyxla_torchtpu.plan import plan_for
from polyxla_torchtpu.plugin import polyxla_preload

TYPES = ["v4-8", "v5e-4", "v5e-8", "v5p-8", "v6e-8", "v5e-1", "tpu7x-2", "tpu7x-8"]
# Torch is imported once; TorchTPU is loaded in a process for each type.
OWN_LAUNCHES = """
import json, os, sys
from polyxla_torchtpu import unloaded
import torch._dynamo, torch._inductor.lowering
for name in sys.argv[1:]:
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0, name
        continue
    os.environ["POLYXLA_EMULATE"] = name
    unloaded.load()
    from torch.tpu import distributed
    distributed.set_tpu_launch_env()
    own = {name: value for name, value in os.environ.items() if name.startswith("TORCH_TPU_")}
    print(name, json.dumps(own), flush=True)
    os._exit(0)
"""


def test_the_variables_are_those_of_torchtpus_own_launches() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN_LAUNCHES, *TYPES],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(tuple(TYPES))]
    assert [name for name, _ in lines] == TYPES
    for name, text in lines:
        own = json.loads(text)
        ours = requested_plan({POLYXLA_EMULATE: name}).process_environments({}, 2)[0]
        assert ours[env.TORCH_TPU_TOPOLOGY] == own[env.TORCH_TPU_TOPOLOGY], name
        counts = [len(environ[env.TORCH_TPU_SLICEBUILDER_ADDRESSES].split(",")) for environ in (ours, own)]
        assert counts[0] == counts[1], name
        assert own.keys() <= ours.keys(), name


def test_each_process_has_its_ranks() -> None:
    environs = requested_plan({POLYXLA_EMULATE: "v4-16"}).process_environments({"KEPT": "yes"}, 2)
    assert [own[tpu.RANK] for own in environs] == [str(rank) for rank in range(8)]
    assert [own[tpu.LOCAL_RANK] for own in environs] == ["0", "1", "2", "3"] * 2
    assert [own[env.NODE_RANK] for own in environs] == ["0"] * 4 + ["1"] * 4
    shared = (env.TORCH_TPU_SLICEBUILDER_ADDRESSES, tpu.MASTER_PORT, env.TORCH_TPU_XPROF_SESSION_ID)
    assert all(len({own[name] for own in environs}) == 1 for name in shared)
    assert {(own[tpu.WORLD_SIZE], own[env.NNODES], own["KEPT"]) for own in environs} == {("8", "2", "yes")}
    assert environs[0][env.TORCH_TPU_TOPOLOGY] == "2,2,2"
    hosts = {address.partition(":")[0] for address in environs[0][shared[0]].split(",")}
    assert len(hosts) == 2


@pytest.mark.parametrize("own", [{}, {tpu.MASTER_ADDR: "h0", tpu.MASTER_PORT: "29511"}])
def test_the_launches_of_several_hosts_agree_where_to_meet(own: dict[str, str]) -> None:
    pod = {POLYXLA_EMULATE: "v4-16", tpu.TPU_WORKER_HOSTNAMES: "127.0.5.1,127.0.5.2", **own}
    launches = [
        requested_plan({**pod, tpu.POLYXLA_EMULATE_HOST: str(host)}).process_environments(pod, 2)
        for host in range(2)
    ]
    assert [[own[tpu.RANK] for own in launch] for launch in launches] == [list("0123"), list("4567")]
    shared = (tpu.MASTER_ADDR, tpu.MASTER_PORT, env.TORCH_TPU_SLICEBUILDER_ADDRESSES)
    meetings = {tuple(own[name] for name in shared) for launch in launches for own in launch}
    addresses = ",".join(f"127.0.5.{host}:{8070 + local}" for host in (1, 2) for local in range(4))
    expected = {tpu.MASTER_ADDR: "127.0.5.1", tpu.MASTER_PORT: "29500", **own}
    assert meetings == {(*expected.values(), addresses)}
    assert all(env.TORCH_TPU_INTERNAL_HANDSHAKE_PORT not in own for launch in launches for own in launch)


def test_a_program_may_launch_the_replicas_of_all_hosts() -> None:
    environ = {POLYXLA_EMULATE: "v4-16"}
    environ |= requested_plan(environ).program_environment(environ)
    assert requested_plan(environ).processes_here == range(8)


def test_what_a_user_has_set_is_not_overwritten() -> None:
    given = {env.TORCH_TPU_TOPOLOGY: "4,1,1", env.TORCH_TPU_SLICEBUILDER_ADDRESSES: "a:1,a:2,a:3,a:4"}
    plan = requested_plan({POLYXLA_EMULATE: "v4-8"})
    assert given.items() <= plan.process_environments(given, 2)[0].items()


def test_each_device_of_a_chip_has_a_process() -> None:
    plan = plan_for({POLYXLA_EMULATE: "tpu7x-8"}, "TPU", (4, 5, 6, 7))
    environs = plan.process_environments({}, 2)
    assert [own[tpu.LOCAL_RANK] for own in environs] == ["4", "5", "6", "7"]
    assert environs[0][env.TORCH_TPU_TOPOLOGY] == "1,2,1,2"
    pod = requested_plan({POLYXLA_EMULATE: "tpu7x-16"}).process_environments({}, 2)
    assert [own[tpu.LOCAL_RANK] for own in pod] == [str(rank % 8) for rank in range(16)]
    assert pod[15][env.TORCH_TPU_TOPOLOGY] == "2,2,2,2"


def test_a_part_of_a_host_keeps_the_numbers_of_its_chips() -> None:
    plan = plan_for({POLYXLA_EMULATE: "v4-8"}, "TPU", (2, 3))
    environs = plan.process_environments({}, 2)
    assert [own[tpu.LOCAL_RANK] for own in environs] == ["2", "3"]
    assert environs[0][env.TORCH_TPU_TOPOLOGY] == "1,2,1"


def test_one_chosen_chip_is_a_topology_of_its_own() -> None:
    plan = plan_for({POLYXLA_EMULATE: "v4-8"}, "TPU", (2,))
    (environ,) = plan.process_environments({}, 2)
    assert [environ[name] for name in (tpu.RANK, tpu.WORLD_SIZE, tpu.LOCAL_RANK)] == ["0", "1", "2"]
    assert environ[env.TORCH_TPU_TOPOLOGY] == "1,1,1"
    assert len(environ[env.TORCH_TPU_SLICEBUILDER_ADDRESSES].split(",")) == 1


def test_processes_do_not_meet_in_a_file_that_torchtpu_leaves() -> None:
    plan = plan_for({POLYXLA_EMULATE: "v4-8"}, "TPU", (0, 1, 2, 3))
    environs = plan.process_environments({env.TORCH_TPU_DEVICES_PER_HOST: "4", "OTHER": "kept"}, 2)
    assert all(own["OTHER"] == "kept" and env.TORCH_TPU_DEVICES_PER_HOST not in own for own in environs)


def test_a_process_is_prepared_for_emulated_chips_only() -> None:
    assert polyxla_preload({POLYXLA_EMULATE: "v5e-4"})[0] == "polyxla_torchtpu.unloaded"
    # The real libtpu does not work in a fork.
    assert polyxla_preload({}) == ()
