"""Who has the chips open: real processes that hold real files, in a directory instead of /dev."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from polyxla.tpu.chip_processes import Holder, find_holders, naming_holders

HOLD = "import sys; files = [open(path) for path in sys.argv[1:]]; print('open', flush=True); input()"

Hold = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    directory = tmp_path / "dev"
    for name in ("accel0", "accel1", "accelerometer", "vfio/7", "vfio/vfio", "null"):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return directory


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Start a process that opens some files, and wait until it has."""
    with ExitStack() as running:

        def start(*paths: Path) -> subprocess.Popen[str]:
            process = running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", HOLD, *map(str, paths)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            running.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            return process

        yield start


def find(dev: Path, **others: object) -> tuple[Holder, ...]:
    return find_holders(dev=dev, lock_file=dev.parent / "lock", **others)  # type: ignore[arg-type]


def test_the_processes_that_have_chips_open_are_naming_holders(dev: Path, hold: Hold) -> None:
    first = hold(dev / "accel1", dev / "accel0", dev / "null")
    second = hold(dev / "vfio/7", dev / "vfio/vfio")
    found = {holder.pid: holder for holder in find(dev)}
    assert found.keys() == {first.pid, second.pid}
    assert found[first.pid].files == (f"{dev}/accel0", f"{dev}/accel1")
    assert found[second.pid].files == (f"{dev}/vfio/7",)
    assert found[first.pid].command.startswith(f"{sys.executable} -c import sys")
    text = str(found[second.pid])
    assert text.startswith(f"process {second.pid} ({sys.executable}")
    assert text.endswith(f" has {dev}/vfio/7 open")


def test_the_process_with_libtpus_lock_file_is_naming_holders(dev: Path, hold: Hold) -> None:
    lock = dev.parent / "lock"
    lock.touch()
    holder = hold(lock)
    assert [(found.pid, found.files) for found in find(dev)] == [(holder.pid, (str(lock),))]
    # A file that nobody has open stays behind after every job.
    holder.kill()
    holder.wait(timeout=30)
    assert find(dev) == ()


def test_other_files_and_other_processes_are_left_out(dev: Path, hold: Hold) -> None:
    hold(dev / "accelerometer", dev / "vfio/vfio", dev / "null")
    own_replica = hold(dev / "accel0")
    with (dev / "accel1").open():
        assert find(dev, but=[own_replica.pid]) == ()
    assert [found.pid for found in find(dev)] == [own_replica.pid]


def test_processes_that_cannot_be_read_are_left_out(dev: Path, tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "1" / "fd").mkdir(parents=True)
    (proc / "1" / "fd" / "3").symlink_to(dev / "accel0")
    (proc / "2").mkdir()
    (proc / "3" / "fd").mkdir(parents=True)
    (proc / "3" / "fd" / "0").write_text("not a link")
    (proc / "self").mkdir()
    assert find(dev, proc=proc) == (Holder(1, "unknown command", (f"{dev}/accel0",)),)
    assert find(dev, proc=tmp_path / "missing") == ()


def test_a_long_command_is_shortened(dev: Path, tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "1" / "fd").mkdir(parents=True)
    (proc / "1" / "fd" / "3").symlink_to(dev / "accel0")
    (proc / "1" / "cmdline").write_bytes(b"python\0train.py\0" + b"x" * 500 + b"\0")
    (holder,) = find(dev, proc=proc)
    assert holder.command.startswith("python train.py xxx")
    assert holder.command.endswith("...")
    assert len(holder.command) == 120


def test_a_command_is_one_line_that_a_terminal_does_not_obey(dev: Path, tmp_path: Path) -> None:
    (tmp_path / "proc" / "1" / "fd").mkdir(parents=True)
    (tmp_path / "proc" / "1" / "fd" / "3").symlink_to(dev / "accel0")
    (tmp_path / "proc" / "1" / "cmdline").write_bytes(b"python\0\x1b[2Jtrain.py\npolyxla: done\0")
    (holder,) = find(dev, proc=tmp_path / "proc")
    assert holder.command == r"python \x1b[2Jtrain.py\npolyxla: done"


def test_the_calling_process_is_never_naming_holders(dev: Path) -> None:
    with (dev / "accel0").open():
        assert os.getpid() not in [found.pid for found in find(dev)]


@pytest.mark.parametrize("text", ["The TPU is already in use by process with pid 1.", "Couldn't open device"])
def test_the_error_of_a_tpu_in_use_names_who_has_it_open(dev: Path, hold: Hold, text: str) -> None:
    holder = hold(dev / "accel0")
    with pytest.raises(RuntimeError, match=text) as caught, naming_holders(dev=dev, lock_file=dev / "lock"):
        raise RuntimeError(text)
    (note,) = caught.value.__notes__
    assert note.startswith(f"process {holder.pid} (")
    assert note.endswith(f") has {dev}/accel0 open")


def test_other_errors_name_nobody(dev: Path, hold: Hold) -> None:
    hold(dev / "accel0")
    with (
        pytest.raises(RuntimeError, match="no memory") as caught,
        naming_holders(dev=dev, lock_file=dev / "lock"),
    ):
        raise RuntimeError("no memory")
    assert not hasattr(caught.value, "__notes__")
