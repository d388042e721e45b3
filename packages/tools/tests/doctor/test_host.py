"""Files, space and memory of a machine, read from real directories, users and mounts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from polyxla_tools.doctor.findings import Status
from polyxla_tools.doctor.host import HostFacts, HostMemory, HostPaths, Space, gather_host, read_memory
from polyxla_tools.doctor.host_checks import (
    check_chips,
    check_disks,
    check_holders,
    check_libtpu_files,
    check_memory,
    check_plugin,
    check_shared_memory,
)

NOBODY = 65534
UNSHARED = ("unshare", "--mount", "--")


@pytest.fixture
def places(tmp_path: Path) -> HostPaths:
    """A host with two v4 chips, as the kernel lists them."""
    for number in range(2):
        device = tmp_path / "pci" / f"0000:00:0{number}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0\n")
        (device / "device").write_text("0x005e\n")
    (tmp_path / "dev").mkdir()
    return HostPaths(
        pci_root=tmp_path / "pci",
        dev=tmp_path / "dev",
        lock_file=tmp_path / "libtpu_lockfile",
        nvidia=tmp_path / "nvidia",
        tpu_logs=tmp_path / "tpu_logs",
        disks=(tmp_path / "not" / "yet", tmp_path),
    )


def gathered_as_nobody(places: HostPaths, directory: Path) -> HostFacts:
    """Gather as an ordinary user, if this process may become one; otherwise it is one already."""
    # Python imports codecs when they are first used, which that user may not be able to read.
    host = gather_host(places)
    if os.geteuid() != 0:
        return host
    for path in (directory, *directory.parents[:-1]):
        path.chmod(path.stat().st_mode | 0o011)
    os.seteuid(NOBODY)
    try:
        return gather_host(places)
    finally:
        os.seteuid(0)


def test_chips_without_device_files_are_a_problem(places: HostPaths) -> None:
    (found,) = check_chips(gather_host(places))
    assert found.status is Status.PROBLEM
    assert found.found == "2 TPU chips attached (v4), and /dev has no file of one"


def test_a_device_file_that_the_user_may_not_open_is_named(places: HostPaths, tmp_path: Path) -> None:
    for number, mode in enumerate((0o666, 0o440)):
        (places.dev / f"accel{number}").touch()
        (places.dev / f"accel{number}").chmod(mode)
    host = gathered_as_nobody(places, tmp_path)
    (found,) = check_chips(host)
    assert found.status is Status.PROBLEM
    assert f"may not open {places.dev}/accel1 (mode 0o440, owner " in found.found
    assert "sudo usermod -aG " in found.fix


def test_files_of_vfio_that_can_be_opened_are_fine(places: HostPaths) -> None:
    (places.dev / "vfio").mkdir()
    for name in ("vfio", "0"):
        (places.dev / "vfio" / name).touch()
    host = gather_host(places)
    assert [Path(file.path).name for file in host.device_files] == ["0", "vfio"]
    assert [finding.status for finding in check_chips(host)] == [Status.OK]


def test_a_process_that_holds_a_chip_is_named_without_its_arguments(places: HostPaths) -> None:
    (places.dev / "accel0").touch()
    code = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(places.dev / "accel0"), "--token=abc"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin
        assert holder.stdout
        with closing(holder.stdin):
            holder.stdout.readline()
            (found,) = check_holders(gather_host(places))
    assert found.status is Status.PROBLEM
    assert found.fix == f"Wait until it ends, or end it: kill {holder.pid}."
    assert "accel0" in found.found
    assert "--token" not in found.found
    assert check_holders(gather_host(places)) == []


def test_files_of_another_user_are_named(places: HostPaths, tmp_path: Path) -> None:
    places.lock_file.touch()
    places.lock_file.chmod(0o444)
    places.tpu_logs.mkdir(mode=0o555)
    host = gathered_as_nobody(places, tmp_path)
    lock, logs = check_libtpu_files(host)
    assert (lock.status, logs.status) == (Status.PROBLEM, Status.NOTE)
    assert lock.fix == f"If no program uses the TPU: sudo rm {places.lock_file}."
    assert logs.fix == "Set TPU_LOG_DIR to a directory of yours."
    without_chips = replace(host, chips=())
    assert check_libtpu_files(without_chips)[0].status is Status.NOTE


def test_a_directory_that_does_not_exist_has_its_parents_space(places: HostPaths, tmp_path: Path) -> None:
    (space,) = gather_host(places).disks
    assert space.paths == (str(tmp_path),)
    assert 0 < space.free <= space.total


def test_a_directory_below_a_closed_one_has_the_space_above_it(places: HostPaths, tmp_path: Path) -> None:
    # As the home of root, in an image that says HOME=/root and runs as another user.
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "cache").mkdir()
    (space,) = gathered_as_nobody(replace(places, disks=(closed / "cache", closed)), tmp_path).disks
    assert space.paths == (str(closed),)


def test_a_full_disk_is_named(places: HostPaths) -> None:
    host = replace(gather_host(places), disks=(Space(("/data",), 10 << 30, 100 << 20),))
    (found,) = check_disks(host)
    assert found.status is Status.PROBLEM
    assert (found.found, found.fix) == ("100 MiB are free at /data", "Make 1.0 GiB free.")


def test_variables_name_the_cache_and_the_logs(tmp_path: Path) -> None:
    places = HostPaths.of({"POLYXLA_COMPILE_CACHE": str(tmp_path), "TPU_LOG_DIR": "/var/log/tpu"})
    assert places.disks[-1] == tmp_path
    assert places.tpu_logs == Path("/var/log/tpu")
    assert len(HostPaths.of({"POLYXLA_COMPILE_CACHE": "off"}).disks) == 2


class TestSharedMemory:
    def test_docker_gives_too_little(self) -> None:
        host = host_with_shared(Space(("/dev/shm",), 64 << 20, 64 << 20))
        (found,) = check_shared_memory(host)
        assert found.status is Status.PROBLEM
        assert found.found.startswith("64 MiB of 64 MiB are free at /dev/shm; at least 128 MiB are needed")
        assert "--shm-size=8g" in found.fix

    def test_none_is_a_problem(self) -> None:
        (found,) = check_shared_memory(host_with_shared(None))
        assert found.status is Status.PROBLEM

    def test_a_small_mount_is_found(self, environ: dict[str, str]) -> None:
        if subprocess.run([*UNSHARED, "true"], capture_output=True, check=False).returncode:
            pytest.skip("this user may not make a mount namespace")
        mount = 'mount -t tmpfs -o size=32m none /dev/shm && exec "$@"'
        command = [sys.executable, "-m", "polyxla", "doctor", "--no-trial", "--json"]
        done = subprocess.run(
            [*UNSHARED, "sh", "-c", mount, "sh", *command],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        document = json.loads(done.stdout)
        assert document["shared_memory"]["total"] == 32 << 20
        (found,) = [finding for finding in document["findings"] if finding["subject"] == "shared memory"]
        assert found["status"] == "problem"
        assert done.returncode == 1


def host_with_shared(space: Space | None) -> HostFacts:
    return replace(gather_host(HostPaths()), shared_memory=space)


class TestMemory:
    def test_this_machine_has_some(self) -> None:
        memory = read_memory()
        assert memory
        assert 0 < memory.available <= memory.total

    def test_the_limit_of_a_control_group_around_counts(self, tmp_path: Path) -> None:
        (tmp_path / "self").mkdir()
        (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
        (tmp_path / "self" / "cgroup").write_text("0::/job/step\n")
        job = tmp_path / "groups" / "job"
        (job / "step").mkdir(parents=True)
        (job / "step" / "memory.max").write_text("max\n")
        (job / "memory.max").write_text(f"{2 << 30}\n")
        (job / "memory.current").write_text(f"{1 << 30}\n")
        (job / "memory.stat").write_text(f"anon 5\ninactive_file {512 << 20}\n")
        memory = read_memory(tmp_path, tmp_path / "groups")
        assert memory == HostMemory(2 << 30, 3 << 29, is_limited=True)
        (job / "memory.max").write_text("max\n")
        assert read_memory(tmp_path, tmp_path / "groups") == HostMemory(8 << 30, 4 << 30)

    def test_the_first_version_of_control_groups_has_limits_too(self, tmp_path: Path) -> None:
        (tmp_path / "self").mkdir()
        (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
        (tmp_path / "self" / "cgroup").write_text(
            "12:cpu,cpuacct:/docker/0123\n4:memory:/docker/0123\n1:name=systemd:/docker/0123\n0::/\n"
        )
        # In a container, its own group is mounted at the place of all.
        group = tmp_path / "groups" / "memory"
        group.mkdir(parents=True)
        (group / "memory.limit_in_bytes").write_text(f"{2 << 30}\n")
        (group / "memory.usage_in_bytes").write_text(f"{1 << 30}\n")
        (group / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {512 << 20}\n")
        limited = HostMemory(2 << 30, 3 << 29, is_limited=True)
        assert read_memory(tmp_path, tmp_path / "groups") == limited
        # What the kernel writes for no limit.
        (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
        assert read_memory(tmp_path, tmp_path / "groups") == HostMemory(8 << 30, 4 << 30)

    def test_a_kernel_that_lists_none_is_no_error(self, tmp_path: Path) -> None:
        assert read_memory(tmp_path, tmp_path) is None
        host = replace(gather_host(HostPaths()), memory=None)
        assert [finding.status for finding in check_memory(host, 8, 4)] == [Status.NOTE]

    def test_replicas_times_workers_decide(self) -> None:
        host = replace(gather_host(HostPaths()), memory=HostMemory(16 << 30, 8 << 30, is_limited=True))
        (fits,) = check_memory(host, 4, 2, replica_bytes=1 << 30)
        assert fits.status is Status.OK
        assert fits.found == (
            "8.0 GiB of 16.0 GiB are available, the limit of this container; "
            "6.0 GiB before model and data for 4 replicas with 2 loader workers each"
        )
        (too_many,) = check_memory(host, 4, 8, replica_bytes=1 << 30)
        assert too_many.status is Status.PROBLEM
        assert "too little: 12.0 GiB before model and data" in too_many.found


DRIVERS = [
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (me@host)\n",
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Fri Aug  1 01:23:45 UTC 2026\nGCC\n",
]


@pytest.mark.parametrize("text", DRIVERS)
def test_gpus_are_named_with_their_driver(
    places: HostPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    bridge = pytest.importorskip("polyxla_bridge.pjrt_plugin", reason="the bridge has the plugins' names")
    on_cuda = {"POLYXLA_PJRT_PLUGIN": "cuda"}
    (missing,) = check_plugin(on_cuda, gather_host(places))
    assert (missing.status, missing.fix) == (
        Status.PROBLEM,
        f"Install it: pip install {bridge.CUDA_PACKAGE!r}",
    )
    library = tmp_path / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(tmp_path)
    (no_driver,) = check_plugin(on_cuda, gather_host(places))
    assert (no_driver.status, "lists no GPU" in no_driver.found) == (Status.PROBLEM, True)
    for number in range(2):
        gpu = places.nvidia / "gpus" / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 24\n")
    (places.nvidia / "version").write_text(text)
    (found,) = check_plugin(on_cuda, gather_host(places))
    assert found.found == (
        "POLYXLA_PJRT_PLUGIN=cuda: xla_cuda13, 2 GPUs (NVIDIA H100 80GB HBM3), driver 580.159.04"
    )


def test_a_plugin_without_a_file_is_a_problem(places: HostPaths) -> None:
    pytest.importorskip("polyxla_bridge", reason="the bridge has the plugins' names")
    host = gather_host(places)
    (finding,) = check_plugin({"POLYXLA_PJRT_PLUGIN": "/no/such.so"}, host)
    assert (finding.status, finding.found) == (
        Status.PROBLEM,
        "POLYXLA_PJRT_PLUGIN=/no/such.so is not a file",
    )
    assert check_plugin({}, host) == []
    assert [finding.status for finding in check_plugin({"POLYXLA_PJRT_PLUGIN": __file__}, host)] == [
        Status.OK
    ]
