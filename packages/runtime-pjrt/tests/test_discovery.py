"""The claims and devices of runtime pjrt, on machines made of directories and variables."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from polyxla import UsageError
from polyxla.plugin import Claim, Discovery, Layout, tpu_env
from polyxla_pjrt import env
from polyxla_pjrt.discovery import discover, requested
from polyxla_pjrt.plan import TpuPlan, plan_for, replica_environment

V4, V3 = "0x005e", "0x0027"
DESCRIBED = {tpu_env.TPU_SKIP_MDS_QUERY: "1", tpu_env.TPU_LIBRARY_PATH: "libtpu.so"}


def machine(directory: Path, device_id: str, chips: int) -> Path:
    """Lay out PCI devices as Linux lists them."""
    for index in range(chips):
        device = directory / f"0000:00:{index:02x}.0"
        device.mkdir()
        (device / "vendor").write_text("0x1ae0\n")
        (device / "device").write_text(f"{device_id}\n")
    return directory


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    return machine(tmp_path, V4, 0)


@pytest.fixture
def v4_host(tmp_path: Path) -> Path:
    return machine(tmp_path, V4, 4)


@pytest.fixture
def v3_host(tmp_path: Path) -> Path:
    return machine(tmp_path, V3, 4)


@pytest.mark.parametrize(
    ("environ", "claim", "reason"),
    [
        ({}, Claim.FALLBACK, "no TPU is attached and no variable says otherwise"),
        ({"PJRT_DEVICE": ""}, Claim.FALLBACK, "no TPU is attached"),
        ({"PJRT_DEVICE": "CPU"}, Claim.EXPLICIT, "PJRT_DEVICE=CPU"),
    ],
    ids=["nothing set", "set but empty", "asked for"],
)
def test_without_a_tpu_the_cpu_is_offered(
    laptop: Path, environ: dict[str, str], claim: Claim, reason: str
) -> None:
    found = discover(environ, "auto", laptop)
    assert (found.claim, found.kind, found.unavailable, len(found.devices)) == (claim, "CPU", None, 1)
    assert reason in found.reason


def test_cpu_num_devices_counts_devices(laptop: Path) -> None:
    found = discover({env.CPU_NUM_DEVICES: "8"}, "auto", laptop)
    assert [device.index for device in found.devices] == list(range(8))


@pytest.mark.parametrize("text", ["0", "abc", "-1", "1.5", "", "²", "0x2"])
def test_a_wrong_cpu_num_devices_is_refused(laptop: Path, text: str) -> None:
    found = discover({env.PJRT_DEVICE: "CPU", env.CPU_NUM_DEVICES: text}, "auto", laptop)
    assert found.unavailable == f"CPU_NUM_DEVICES={text} is not a positive integer"
    assert found.fix == "Write CPU_NUM_DEVICES=1, or unset it."
    assert found.devices == ()


@pytest.mark.parametrize("kind", ["FOO", "cpu", "GPU", "CUDA"])
def test_an_unknown_device_type_is_refused(laptop: Path, kind: str) -> None:
    found = discover({env.PJRT_DEVICE: kind}, "auto", laptop)
    assert found.claim is Claim.EXPLICIT
    assert found.unavailable == f"PJRT_DEVICE={kind} is not a device that runtime 'pjrt' can drive"
    assert found.fix == "Write PJRT_DEVICE=CPU or PJRT_DEVICE=TPU."


def test_an_accelerator_that_contradicts_the_variable_is_refused(laptop: Path) -> None:
    found = discover({env.PJRT_DEVICE: "CPU"}, "tpu", laptop)
    assert found.unavailable == "accelerator='tpu' and PJRT_DEVICE=CPU contradict each other"
    assert "set PJRT_DEVICE=TPU" in found.fix


@pytest.mark.parametrize("environ", [{}, {env.PJRT_DEVICE: "CPU"}, {tpu_env.POLYXLA_EMULATE: "v3-8"}])
def test_an_unknown_accelerator_is_refused_with_what_to_write(laptop: Path, environ: dict[str, str]) -> None:
    found = discover(environ, "gpu", laptop)
    assert found.unavailable == "accelerator='gpu' is not a device that runtime 'pjrt' can drive"
    assert found.fix == "Write accelerator='tpu' or accelerator='cpu', or leave it out."


@pytest.mark.parametrize("environ", [{"PJRT_DEVICE": "TPU"}, {}], ids=["by variable", "by accelerator"])
def test_a_missing_tpu_is_refused(laptop: Path, environ: dict[str, str]) -> None:
    found = discover(environ, "tpu", laptop)
    assert found.unavailable == "no TPU chip is attached to this machine"
    assert "set PJRT_DEVICE=CPU" in found.fix


def test_a_plain_launch_names_what_asks_for_the_missing_tpu() -> None:
    with pytest.raises(UsageError, match=r"no TPU chip is attached to this machine \(from PJRT_DEVICE=TPU\)"):
        requested({"PJRT_DEVICE": "TPU"})


def test_attached_chips_claim_the_machine(v4_host: Path) -> None:
    found = discover({**DESCRIBED, tpu_env.TPU_ACCELERATOR_TYPE: "v4-8"}, "auto", v4_host)
    assert (found.claim, found.reason) == (Claim.ATTACHED, "4 TPU chip(s) attached")
    assert (found.kind, found.topology, found.host_count, len(found.devices)) == ("TPU", "v4-8", 1, 4)


def test_accelerator_cpu_leaves_the_chips_alone(v4_host: Path) -> None:
    found = discover({}, "cpu", v4_host)
    assert (found.kind, found.claim, len(found.devices)) == ("CPU", Claim.FALLBACK, 1)


def test_a_v3_chip_is_two_devices(v3_host: Path) -> None:
    found = discover({**DESCRIBED, tpu_env.TPU_ACCELERATOR_TYPE: "v3-8"}, "auto", v3_host)
    assert len(found.devices) == 8
    assert found.devices[5].name == "v3-8 chip 2 core 1"


def test_the_second_host_of_a_pod_offers_its_own_chips(v4_host: Path) -> None:
    pod = {
        tpu_env.TPU_ACCELERATOR_TYPE: "v4-16",
        tpu_env.TPU_WORKER_ID: "1",
        tpu_env.TPU_WORKER_HOSTNAMES: "a,b",
    }
    found = discover({**DESCRIBED, **pod}, "auto", v4_host)
    assert (found.host_count, len(found.devices)) == (2, 4)
    assert {device.host_index for device in found.devices} == {1}


def test_visible_chips_narrow_the_devices(v4_host: Path) -> None:
    part = {
        tpu_env.TPU_ACCELERATOR_TYPE: "v4-8",
        tpu_env.TPU_VISIBLE_CHIPS: "2,3",
        tpu_env.TPU_PROCESS_BOUNDS: "1,1,1",
        tpu_env.TPU_CHIPS_PER_PROCESS_BOUNDS: "1,2,1",
    }
    environ = {**DESCRIBED, **part}
    found = discover(environ, "auto", v4_host)
    assert [device.name for device in found.devices] == ["v4-8 chip 2 core 0", "v4-8 chip 3 core 0"]
    assert replica_environment(environ, found, (1,))[tpu_env.TPU_VISIBLE_CHIPS] == "3"


def test_a_missing_libtpu_is_named(v4_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    environ = {tpu_env.TPU_SKIP_MDS_QUERY: "1", tpu_env.TPU_ACCELERATOR_TYPE: "v4-8"}
    found = discover(environ, "auto", v4_host)
    assert found.unavailable == "TPU chips are attached, but libtpu is not installed"
    assert "pip install './packages/runtime-pjrt[tpu]'" in found.fix


def test_an_undescribed_slice_names_the_variables_to_set(v4_host: Path) -> None:
    closed = {tpu_env.TPU_LIBRARY_PATH: "libtpu.so", tpu_env.GCE_METADATA_HOST: "127.0.0.1:1"}
    found = discover(closed, "auto", v4_host)
    assert found.unavailable is not None
    assert (
        "neither the environment nor the metadata server says which slice they belong to" in found.unavailable
    )
    assert "TPU_ACCELERATOR_TYPE" in found.fix


def test_one_cpu_replica_needs_the_device_type(laptop: Path) -> None:
    environ = {env.CPU_NUM_DEVICES: "8"}
    wanted = replica_environment(environ, discover(environ, "auto", laptop), (5,))
    assert wanted == {env.PJRT_DEVICE: "CPU", env.POLYXLA_PJRT_LOCAL_DEVICE: "5"}


def test_core_five_of_a_v3_host_is_the_second_core_of_chip_two(v3_host: Path) -> None:
    environ = {**DESCRIBED, tpu_env.TPU_ACCELERATOR_TYPE: "v3-8"}
    wanted = replica_environment(environ, discover(environ, "auto", v3_host), (5,))
    assert wanted[env.PJRT_DEVICE] == "TPU"
    assert (wanted[tpu_env.TPU_VISIBLE_CHIPS], wanted[env.POLYXLA_PJRT_LOCAL_DEVICE]) == ("2", "1")
    assert wanted[tpu_env.TPU_PROCESS_BOUNDS] == wanted[tpu_env.TPU_CHIPS_PER_PROCESS_BOUNDS] == "1,1,1"


def test_a_prepared_process_keeps_its_core(v3_host: Path) -> None:
    environ = {**DESCRIBED, tpu_env.TPU_ACCELERATOR_TYPE: "v3-8"}
    environ |= replica_environment(environ, discover(environ, "auto", v3_host), (5,))
    again = discover(environ, "auto", v3_host)
    assert replica_environment(environ, again, (5,)) == {}
    with pytest.raises(
        UsageError, match="this process was prepared for device 5, but the code requests device 2"
    ):
        replica_environment(environ, again, (2,))


class MetadataOfAV4(BaseHTTPRequestHandler):
    """What Google's metadata server answers on a v4-8."""

    def do_GET(self) -> None:
        answers = {
            "tpu-env": "ACCELERATOR_TYPE: 'v4-8'\nTPU_PROCESS_BOUNDS: '1,1,1'\n"
            "TPU_CHIPS_PER_PROCESS_BOUNDS: '2,2,1'\nWORKER_ID: '0'\n",
            "worker-network-endpoints": "a:1:10.0.0.2",
        }
        answer = answers.get(self.path.rpartition("/")[2], "").encode()
        self.send_response(200 if answer else 404)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def metadata_host() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), MetadataOfAV4) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(timeout=10)


@pytest.mark.parametrize("device", [0, 2])
def test_a_program_prepared_for_a_chip_finds_that_one(v4_host: Path, metadata_host: str, device: int) -> None:
    # On a TPU VM, where the metadata server goes on to describe all chips.
    environ = {tpu_env.GCE_METADATA_HOST: metadata_host, tpu_env.TPU_LIBRARY_PATH: "libtpu.so"}
    found = discover(environ, "auto", v4_host)
    assert [device.index for device in found.devices] == [0, 1, 2, 3], found.unavailable
    environ |= replica_environment(environ, found, (device,))
    assert environ[tpu_env.TPU_VISIBLE_CHIPS] == str(device)
    again = discover(environ, "auto", v4_host)
    assert [found.index for found in again.devices] == [device], again.unavailable
    assert replica_environment(environ, again, (device,)) == {}


def test_replicas_without_the_bridge_are_refused(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polyxla_bridge", None)
    with pytest.raises(UsageError, match="3 replicas on the CPU need polyxla-bridge, which is not installed"):
        replica_environment({}, discover({}, "auto", laptop), (0, 1, 2))


def test_a_fixed_number_of_devices_does_not_grow(laptop: Path) -> None:
    assert discover({}, "auto", laptop).growable
    assert not discover({env.CPU_NUM_DEVICES: "2"}, "auto", laptop).growable


def test_every_variable_is_listed_with_its_origin(laptop: Path) -> None:
    found: Discovery = discover({env.PJRT_DEVICE: "CPU"}, "auto", laptop)
    assert found.variables.keys() == {*env.READ, *tpu_env.READ}
    assert (found.variables[env.PJRT_DEVICE].value, found.variables[env.PJRT_DEVICE].origin) == (
        "CPU",
        "environment",
    )
    assert found.variables[env.CPU_NUM_DEVICES].origin == "default"


V4_32 = {
    tpu_env.TPU_ACCELERATOR_TYPE: "v4-32",
    tpu_env.TPU_WORKER_ID: "2",
    tpu_env.TPU_WORKER_HOSTNAMES: "a,b,c,d",
}


@pytest.mark.parametrize(
    ("described", "devices", "layout", "first", "bounds", "chips"),
    [
        ({tpu_env.TPU_ACCELERATOR_TYPE: "v4-8"}, (0, 1, 2, 3), Layout(1, 4), 0, "2,2,1", "0123"),
        ({tpu_env.TPU_ACCELERATOR_TYPE: "v4-8"}, (2, 3), Layout(1, 2), 0, "1,2,1", "23"),
        ({tpu_env.TPU_ACCELERATOR_TYPE: "v4-8"}, (1, 3), Layout(1, 2), 0, "2,1,1", "13"),
        ({tpu_env.TPU_ACCELERATOR_TYPE: "v3-8"}, tuple(range(8)), Layout(2, 4), 0, "2,2,1", "0123"),
        ({tpu_env.TPU_ACCELERATOR_TYPE: "v3-8"}, (4, 5, 6, 7), Layout(2, 2), 0, "1,2,1", "23"),
        (V4_32, (0, 1, 2, 3), Layout(1, 4, 4), 8, "2,2,4", "0123"),
    ],
)
def test_several_tpu_cores_get_a_process_for_each_chip(
    described: dict[str, str], devices: tuple[int, ...], layout: Layout, first: int, bounds: str, chips: str
) -> None:
    plan = plan_for(DESCRIBED | described, "TPU", devices)
    assert isinstance(plan, TpuPlan)
    assert (plan.layout, plan.first_process, plan.is_bridged) == (layout, first, False)
    environs = plan.process_environments({"KEPT": "1"}, cpu_count=2)
    assert [own[tpu_env.TPU_VISIBLE_CHIPS] for own in environs] == list(chips)
    assert [own[tpu_env.CLOUD_TPU_TASK_ID] for own in environs] == [
        str(first + i) for i in range(len(environs))
    ]
    assert [own[env.PJRT_LOCAL_PROCESS_RANK] for own in environs] == [str(i) for i in range(len(environs))]
    assert {own[tpu_env.TPU_PROCESS_BOUNDS] for own in environs} == {bounds}
    assert {(own[env.PJRT_DEVICE], own["KEPT"], own[tpu_env.TPU_SKIP_MDS_QUERY]) for own in environs} == {
        ("TPU", "1", "1")
    }
    assert plan.program_environment({}, 2) == {env.PJRT_DEVICE: "TPU"}


@pytest.mark.parametrize(
    ("described", "devices", "why"),
    [
        ({tpu_env.TPU_ACCELERATOR_TYPE: "v4-8"}, (0, 3), "not neighbours that form a box"),
        ({tpu_env.TPU_ACCELERATOR_TYPE: "v4-8"}, (0, 1, 2), "not neighbours that form a box"),
        ({tpu_env.TPU_ACCELERATOR_TYPE: "v3-8"}, (1, 2), "are not whole chips, which have 2 cores each"),
        (V4_32, (0, 1), "4 hosts must use all their chips"),
        (
            {tpu_env.TPU_ACCELERATOR_TYPE: "v4-8", "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"},
            (0, 1, 2, 3),
            "torchrun has started 2 processes, but 4 replicas here are 4 processes x 1 threads",
        ),
    ],
)
def test_tpu_cores_that_cannot_be_used_together_are_refused(
    described: dict[str, str], devices: tuple[int, ...], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        plan_for(DESCRIBED | described, "TPU", devices)
