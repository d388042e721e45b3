"""The directory of the compilation cache: its size, leftovers of killed writers, concurrent writers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from polyxla_bridge.programs import cache
from polyxla_bridge.programs.cache import CacheDirectory, why_unusable

PROGRAM = Path(__file__).with_name("programs") / "cache_writers.py"


def put(directory: Path, name: str, size: int, age_s: float) -> Path:
    path = directory / name
    path.write_bytes(bytes(size))
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_least_recently_used_programs_are_evicted(tmp_path: Path) -> None:
    for number in range(5):
        put(tmp_path, f"polyxla-{number}", 1_000, 500 - number)
    directory = CacheDirectory(tmp_path, 3_500)
    assert len(directory.read("polyxla-0", is_use=True)) == 1_000
    assert len(directory.read("polyxla-1", is_use=False)) == 1_000
    directory.sweep()
    assert names(tmp_path) == {"polyxla-0", "polyxla-3", "polyxla-4"}


def test_a_directory_within_the_limit_is_not_swept(tmp_path: Path) -> None:
    put(tmp_path, "polyxla-a", 1_000, 1e6)
    CacheDirectory(tmp_path, 1_000).sweep()
    assert names(tmp_path) == {"polyxla-a"}


def test_files_of_others_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    put(tmp_path, "a9f3", 9_000, 1e6)
    put(tmp_path, ".hidden", 9_000, 1e6)
    put(tmp_path, "polyxla-a", 1_000, 1e6)
    CacheDirectory(tmp_path, 1_000).sweep()
    assert names(tmp_path) == {"a9f3", ".hidden", "polyxla-a"}


def test_the_size_is_checked_after_the_first_write_and_then_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        put(tmp_path, f"polyxla-{number}", 1_000, 500 - number)
    monkeypatch.setattr(cache, "SWEEP_BYTES", 2_500)
    directory = CacheDirectory(tmp_path, 2_000)
    directory.write("polyxla-a", bytes(1_000))
    assert names(tmp_path) == {"polyxla-2", "polyxla-a"}, "after the first one"
    directory.write("polyxla-b", bytes(1_000))
    directory.write("polyxla-c", bytes(1_000))
    assert len(names(tmp_path)) == 4, "not after every one"
    directory.write("polyxla-d", bytes(1_000))
    assert names(tmp_path) == {"polyxla-c", "polyxla-d"}


def test_an_unfinished_file_is_deleted_when_it_is_old(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "killed_before_the_rename", str(tmp_path)], check=False
    )
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".polyxla-a.")
    directory = CacheDirectory(tmp_path)
    with pytest.raises(FileNotFoundError):
        directory.read("polyxla-a", is_use=True)
    directory.sweep()
    assert left.exists(), "another process may be writing it"
    put(tmp_path, left.name, 9, cache.ABANDONED_S + 1)
    directory.write("polyxla-b", b"")
    assert names(tmp_path) == {"polyxla-b"}


def test_many_processes_write_read_and_sweep_at_once(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "many_writes", str(tmp_path)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    assert [(process.communicate(timeout=60)[1], process.returncode) for process in writers] == [("", 0)] * 4
    CacheDirectory(tmp_path, 5_000).sweep()
    left = list(tmp_path.iterdir())
    assert 1 <= len(left) <= 5
    for path in left:
        assert path.read_bytes() == bytes([int(path.name.removeprefix("polyxla-"))]) * 1_000


def test_threads_of_one_process_sweep_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = []
    monkeypatch.setattr(CacheDirectory, "sweep", lambda self: swept.append(self.path))
    directory = CacheDirectory(tmp_path)
    threads = [
        threading.Thread(target=directory.write, args=(f"polyxla-{number}", b"x")) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names(tmp_path)) == 8
    assert len(swept) == 1


def test_a_private_directory_is_made_for_its_owner_only(tmp_path: Path) -> None:
    directory = tmp_path / "caches" / "programs"
    assert why_unusable(directory, is_private=True) is None
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o770)
    assert why_unusable(directory, is_private=True) == f"other users may write to {directory}"
    assert why_unusable(directory, is_private=False) is None


def test_an_unusable_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    assert str(file) in str(why_unusable(file / "programs", is_private=False))
    assert str(file) in str(why_unusable(file, is_private=False))
    # Simulated, because root, as in a container, may write anywhere.
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert why_unusable(tmp_path, is_private=False) == f"{tmp_path} is not writable"


def test_a_directory_that_is_deleted_meanwhile_is_made_again(tmp_path: Path) -> None:
    directory = CacheDirectory(tmp_path / "programs")
    directory.write("polyxla-a", b"one")
    shutil.rmtree(tmp_path / "programs")
    with pytest.raises(FileNotFoundError):
        directory.read("polyxla-a", is_use=True)
    directory.write("polyxla-b", b"two")
    assert directory.read("polyxla-b", is_use=True) == b"two"
    assert names(tmp_path / "programs") == {"polyxla-b"}


def test_where_everyone_may_write_programs_of_others_are_not_read(tmp_path: Path) -> None:
    directory = CacheDirectory(tmp_path)
    directory.write("polyxla-own", b"own")
    os.mkfifo(tmp_path / "polyxla-pipe")
    with pytest.raises(PermissionError):
        directory.read("polyxla-pipe", is_use=True)
    if os.geteuid():
        pytest.skip("only root can write a file of another user")
    directory.write("polyxla-other", b"other")
    os.chown(tmp_path / "polyxla-other", 12345, 12345)
    assert directory.read("polyxla-other", is_use=True) == b"other", "the directory is shared with a group"
    tmp_path.chmod(0o1777)
    assert directory.read("polyxla-own", is_use=True) == b"own"
    with pytest.raises(PermissionError, match="user 12345 has put it where everyone may write"):
        directory.read("polyxla-other", is_use=True)
