"""The file stays whole if its writer is killed, the disk is full, or others write too."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from polyxla_training.checkpoint import (
    CheckpointError,
    Format,
    atomic,
    load,
    safetensors_header,
    save,
    state_file,
)
from polyxla_training.checkpoint.atomic import SUFFIX

TIMEOUT_S = 60.0
PROGRAMS = Path(__file__).parent / "programs"
MEBIBYTE = 2**20


def _parts(directory: Path) -> list[Path]:
    return list(directory.glob(f".*{SUFFIX}"))


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(PROGRAMS / "saving_loop.py"), str(tmp_path / "state")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        guard = threading.Timer(TIMEOUT_S, process.kill)
        guard.start()
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()
        guard.cancel()


def _kill_while_saving(process: subprocess.Popen[str], first: int, after_s: float) -> int:
    """Make a process save from step `first` on, and kill it; return the last step that it saved."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{first}\n")
    process.stdin.flush()
    said = dict.fromkeys(("pid", "saved"), 0)
    while not all(said.values()):
        kind, number = process.stdout.readline().split()
        said[kind] = int(number)
    time.sleep(after_s)
    os.kill(said["pid"], signal.SIGKILL)
    while "ended" not in said:
        kind, number = process.stdout.readline().split()
        said[kind] = int(number)
    return said["saved"]


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(
    saving: subprocess.Popen[str], tmp_path: Path
) -> None:
    moments = random.Random(7)
    left_behind = 0
    for run in range(20):
        last = _kill_while_saving(saving, 1 + 1000 * run, moments.uniform(0, 0.08))
        left_behind += len(_parts(tmp_path))
        state = load(tmp_path / "state")
        # If it is killed between a rename and its report of it, it has finished one write more.
        assert state["step"] in (last, last + 1)
        assert all(bool((part == state["step"]).all()) for part in state["parts"])
    assert left_behind, "it was killed while it wrote"
    assert len(_parts(tmp_path)) <= 1, "the next writer removed what was left"
    save({}, tmp_path / "other")
    assert _parts(tmp_path) == []


def test_the_file_of_a_living_writer_is_not_removed(tmp_path: Path) -> None:
    with atomic.replacing(tmp_path / "state", 3) as file:
        file.write(b"one")
        atomic.sweep(tmp_path)
        save({}, tmp_path / "other")
        assert len(_parts(tmp_path)) == 1
    assert (tmp_path / "state").read_bytes() == b"one"


def test_a_writer_whose_file_a_sweep_removes_starts_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The sweep comes between the file's creation and its lock: first it has the lock, then the file is gone.
    locks = iter([BlockingIOError, FileNotFoundError, None])

    def flock(file: BinaryIO, _: int) -> None:
        wrong = next(locks, None)
        if wrong is FileNotFoundError:
            Path(file.name).unlink()
        elif wrong is not None:
            raise wrong

    monkeypatch.setattr(fcntl, "flock", flock)
    save([1], tmp_path / "state")
    assert next(locks, "all asked") == "all asked"
    assert load(tmp_path / "state") == [1]


def test_without_locks_it_saves_and_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    left = tmp_path / f".state.0{SUFFIX}"
    left.touch()
    monkeypatch.setattr(fcntl, "flock", flock)
    save([1], tmp_path / "state")
    assert load(tmp_path / "state") == [1]
    assert _parts(tmp_path) == [left]


def test_a_reader_beside_concurrent_writers_finds_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save([torch.zeros(2**14)], path)
    wrong: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            (found,) = load(path)
            if found.min() != found.max():
                wrong.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda value: save([torch.full((2**14,), float(value))], path), range(80)))
    done.set()
    reader.join(TIMEOUT_S)
    assert wrong == []
    assert _parts(tmp_path) == []


@contextlib.contextmanager
def _files_end_at(size_bytes: int) -> Iterator[None]:
    """Limit the size of this process's files: the only full disk that every machine can have."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_a_size_limit_leaves_the_old_file_and_nothing_else(tmp_path: Path, format: Format) -> None:
    path = tmp_path / "state"
    save({"step": 1}, path, format=format)
    big = {"step": 2, "big": torch.zeros(MEBIBYTE)}
    with _files_end_at(MEBIBYTE), pytest.raises(CheckpointError, match="File too large") as caught:
        save(big, path, format=format)
    assert "it needs 4.0 MiB and" in caught.value.what
    assert "are free; the previous checkpoint is unchanged" in caught.value.what
    assert load(path, format=format) == {"step": 1}
    assert _names(tmp_path) == ["state"]
    save(big, path, format=format)
    assert load(path, format=format)["step"] == 2


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', str(tmp_path)]
    if subprocess.run([*mount, "true"], capture_output=True, timeout=TIMEOUT_S, check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    command = [*mount, sys.executable, str(PROGRAMS / "full_disk.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert (
            "state' cannot be written: No space left on device: it needs 4.0 MiB and 1020.0 KiB are free"
            in line
        )
        assert "the previous checkpoint is unchanged" in line
    assert len(done.stdout.splitlines()) == 2


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"step": 1}, tmp_path / "state")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(state_file, "on_host", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save({"step": torch.ones(1)}, tmp_path / "state")
    assert load(tmp_path / "state") == {"step": 1}
    assert _names(tmp_path) == ["state"]


def test_missing_directories_are_made_and_long_names_fit(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / ("é" * 110 + ".safetensors")
    save([1], path)
    assert load(path) == [1]


@pytest.mark.parametrize("where", ["state", "new/state"])
def test_a_directory_without_write_permission_is_an_error(
    tmp_path: Path, where: str, unprivileged: AbstractContextManager[None]
) -> None:
    tmp_path.chmod(0o500)
    with unprivileged, pytest.raises(CheckpointError, match="cannot be written: Permission denied"):
        save([1], tmp_path / where)
    tmp_path.chmod(0o700)
    assert _names(tmp_path) == []


def test_paths_of_directories_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written: Is a directory"):
        save([1], tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be written: (Not a directory|File exists)"):
        save([1], tmp_path / "file" / "state")
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: state\.safetensors in it cannot be"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory"):
        load(tmp_path / "nothing")
    assert _names(tmp_path) == ["file"]


def test_too_much_metadata_for_the_format_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 10_000)
    with pytest.raises(
        CheckpointError, match=r"the values other than tensors take 19\.\d KiB, and the format allows"
    ):
        save(["x" * 20_000], tmp_path / "state")
    assert _names(tmp_path) == []


def _high_water_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    # Each takes four bytes until it is copied. The allocator returns freed memory of this size to the system.
    state = [torch.full((1,), float(at)).expand(10 * MEBIBYTE) for at in range(4)]
    save([tensor[:1000] for tensor in state], tmp_path / "state")
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water_bytes()
    save(state, tmp_path / "state")
    assert _high_water_bytes() - before < 60 * MEBIBYTE, "it needs 40 MiB for one of them"
    assert (tmp_path / "state").stat().st_size > 160 * MEBIBYTE
    assert [tensor[-1].item() for tensor in load(tmp_path / "state")] == list(range(4))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_a_contiguous_tensor_on_the_host_is_written_without_a_copy(tmp_path: Path) -> None:
    state = [torch.ones(10 * MEBIBYTE)]
    save(state[0][:1000], tmp_path / "state")
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water_bytes()
    save(state, tmp_path / "state")
    assert _high_water_bytes() - before < 20 * MEBIBYTE, "a copy takes 40 MiB"
    assert (tmp_path / "state").stat().st_size > 40 * MEBIBYTE
