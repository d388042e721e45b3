"""A directory of checkpoints: names, the newest intact one, and which are deleted when."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyxla_training.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    DamagedCheckpointError,
    folder,
    load,
)
from polyxla_training.storage import Location


def _names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def _damage(path: Location) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints")
    assert checkpoints.entries() == []
    assert checkpoints.latest() is None
    assert checkpoints.load_latest() is None
    for step in (20, 3, 123_456_789):
        path = checkpoints.save(step, {"step": step}, keep_forever=step == 3)
        assert load(path) == {"step": step}
    entries = checkpoints.entries()
    assert [(entry.step, entry.path.name, entry.is_kept) for entry in entries] == [
        (3, "step-00000003-kept.safetensors", True),
        (20, "step-00000020.safetensors", False),
        (123_456_789, "step-123456789.safetensors", False),
    ]
    assert [entry.size_bytes for entry in entries] == [entry.path.stat().st_size for entry in entries]
    assert entries[0].time_s == entries[0].path.stat().st_mtime
    assert checkpoints.latest() == entries[-1]


def test_the_newest_intact_one_is_loaded_and_damaged_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, {"step": step, "weight": torch.full((3,), step)})
    _damage(tmp_path / "step-00000004.safetensors")
    (tmp_path / "step-00000003.safetensors").write_bytes(b"")
    found = checkpoints.load_latest()
    assert found is not None
    entry, state = found
    assert entry.step == state["step"] == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "step-00000004.safetensors' is damaged, or is not a checkpoint: it is cut short" in said[0]
    assert "step-00000003.safetensors' is damaged" in said[1]
    assert all(line.endswith("; loading the checkpoint before it") for line in said)


def test_a_changed_bit_in_a_tensor_is_damage_too(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for step in (1, 2):
        path = checkpoints.save(step, [torch.zeros(4)])
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\1")
    found = checkpoints.load_latest()
    assert found is not None
    assert found[0].step == 1


def test_an_error_names_all_checkpoints_if_all_are_damaged(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for step in (1, 2):
        _damage(checkpoints.save(step, [1]))
    with pytest.raises(
        DamagedCheckpointError, match=r"every checkpoint in .* step-00000002.*, step-00000001"
    ):
        checkpoints.load_latest()


def test_an_unreadable_checkpoint_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, [step])

    def refuse(path: Path, **_: object) -> None:
        raise CheckpointError(f"{path} cannot be read: Input/output error", fix="Try again.")

    monkeypatch.setattr(folder, "load", refuse)
    with pytest.raises(CheckpointError, match=r"step-00000002.*Input/output error"):
        checkpoints.load_latest()


@pytest.fixture
def run() -> Iterator[Path]:
    """A directory that other users find; those above pytest's own they may not even enter."""
    with TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(
    run: Path, unprivileged: AbstractContextManager[None]
) -> None:
    checkpoints = CheckpointFolder(run)
    checkpoints.save(1, [1])
    run.chmod(0o311)
    with unprivileged, pytest.raises(CheckpointError, match=r"cannot be listed: .*Permission denied"):
        checkpoints.load_latest()
    run.chmod(0o755)
    assert checkpoints.latest() is not None


def test_a_checkpoint_in_shards_that_cannot_be_listed_is_not_skipped(
    run: Path, unprivileged: AbstractContextManager[None]
) -> None:
    checkpoints, shards = CheckpointFolder(run), run / "step-00000002.shards"
    checkpoints.save(1, [1])
    shards.mkdir()
    shards.chmod(0o311)
    with unprivileged, pytest.raises(CheckpointError, match=r"cannot be listed: .*Permission denied"):
        checkpoints.load_latest()
    shards.chmod(0o755)


def test_a_checkpoint_is_saved_where_old_ones_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    checkpoints.save(1, [1])

    def fails(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fails)
        checkpoints.save(2, [2])
    assert "polyxla: old checkpoints are not deleted: " in capsys.readouterr().err
    assert [entry.step for entry in checkpoints.entries()] == [1, 2]


def test_the_oldest_are_deleted_but_for_those_kept_forever(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    for step in range(6):
        checkpoints.save(step, [step], keep_forever=step == 1)
    assert [entry.step for entry in checkpoints.entries()] == [1, 4, 5]
    assert all(load(entry.path) == [entry.step] for entry in checkpoints.entries())


def test_nothing_is_deleted_before_the_new_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    checkpoints.save(1, [1])
    with pytest.raises(CheckpointError, match="is a function"):
        checkpoints.save(2, [lambda: 1])
    assert _names(tmp_path) == ["step-00000001.safetensors"]
    seen: list[list[str]] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        seen.append([name for name in _names(tmp_path) if name.startswith("step")])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    checkpoints.save(2, [2])
    # The file is synced, then the directory with its name.
    both = ["step-00000001.safetensors", "step-00000002.safetensors"]
    assert seen == [both[:1], both]
    assert _names(tmp_path) == both[1:]


def test_other_files_in_the_directory_stay(tmp_path: Path) -> None:
    strange = {
        "step-00000000.safetensors": b"no checkpoint of polyxla's",
        "step-00000001.safetensors.bak": b"",
        "step-1.safetensors": b"",
        "notes.txt": b"",
        "step-00000002-best.safetensors": b"",
    }
    for name, content in strange.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "step-00000003.safetensors").mkdir()
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    for step in (7, 8):
        checkpoints.save(step, [step])
    assert set(_names(tmp_path)) == {*strange, "step-00000003.safetensors", "step-00000008.safetensors"}


def test_a_checkpoint_that_another_process_deletes_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.safetensors").symlink_to(tmp_path / "gone")
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    for step in (2, 3):
        checkpoints.save(step, [step])
    assert [entry.step for entry in checkpoints.entries()] == [3]


@given(steps=st.lists(st.integers(0, 12), min_size=1, max_size=8), keep=st.integers(1, 3))
@settings(max_examples=40)
def test_the_last_saved_checkpoint_is_never_deleted(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], keep: int
) -> None:
    checkpoints = CheckpointFolder(tmp_path_factory.mktemp("run"), keep=keep)
    for count, step in enumerate(steps, 1):
        path = checkpoints.save(step, [count])
        assert load(path) == [count]
        there = {entry.step for entry in checkpoints.entries()}
        assert len(there) <= keep + 1
        assert there - {step} <= set(sorted({*there, step})[-keep:]), "a run that goes back keeps the highest"


def test_invalid_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep=0 is not a positive integer"):
        CheckpointFolder(tmp_path, keep=0)
    with pytest.raises(CheckpointError, match="step=-1 is negative"):
        CheckpointFolder(tmp_path).save(-1, [])
