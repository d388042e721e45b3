"""Replicas resume from the same checkpoint, or all raise an error that names hosts and ordinals."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import polyxla
from polyxla import UsageError
from polyxla.plugin import World
from polyxla_training import CheckpointError, CheckpointFolder, load, resume, save
from polyxla_training.resume import load_same

pytestmark = pytest.mark.usefixtures("fake_replicas")
HOST = re.escape(socket.gethostname())


def _load(sources: Sequence[str], directories: Sequence[Any] = (None,) * 4) -> list[Any]:
    """Let each replica load its own source, as on a host of its own; return results or errors."""

    def load_one(replica: polyxla.Replica) -> Any:
        # The working directory belongs to the process, and these replicas are its threads.
        try:
            found = load_same(replica, sources[replica.ordinal], directories[replica.ordinal])
        except UsageError as error:
            return error
        return found[1].state if found else None

    return polyxla.launch(load_one, runtime="fake", devices=4)


def _saved(directory: str, *steps: int, value: int = 0) -> Path:
    folder = CheckpointFolder(directory)
    for step in steps:
        folder.save(step, {"step": step, "value": value})
    return Path(directory)


def test_replicas_with_the_same_files_load_the_newest() -> None:
    _saved("shared", 1, 2)
    assert _load(["auto"] * 4, ["shared"] * 4) == [{"step": 2, "value": 0}] * 4


def test_without_any_checkpoint_nothing_is_loaded() -> None:
    assert _load(["auto"] * 4, ["nowhere"] * 4) == [None] * 4
    assert _load(["auto"] * 4) == [None] * 4


def test_a_directory_that_cannot_be_listed_is_an_error_in_all() -> None:
    Path("file").write_text("")
    errors = _load(["auto"] * 4, ["file"] * 4)
    assert all("'file' cannot be listed: " in str(error) for error in errors)


def test_a_damaged_newest_checkpoint_is_skipped_by_all() -> None:
    damaged = _saved("shared", 1, 2) / "step-00000002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert _load(["auto"] * 4, ["shared"] * 4) == [{"step": 1, "value": 0}] * 4


@pytest.mark.parametrize("reader", [0, 1], ids=["the-first-that-chooses", "another"])
def test_replicas_meet_while_one_reads_for_long(
    reader: int, meetings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved("shared", 1)
    reads = itertools.count()

    def slow(place: Any) -> Any:
        # The first that reads is ordinal 0, which chooses.
        if next(reads) == reader:
            meetings.wait(20)
        return load(place)

    monkeypatch.setattr(resume, "load", slow)
    assert _load(["auto"] * 4, ["shared"] * 4) == [{"step": 1, "value": 0}] * 4


def test_copies_with_the_same_content_will_do() -> None:
    paths = [str(_saved(f"host{host}", 3) / "step-00000003.safetensors") for host in range(4)]
    assert _load(paths) == [{"step": 3, "value": 0}] * 4


def test_a_checkpoint_that_some_replicas_cannot_read_is_an_error_in_all(tmp_path: Path) -> None:
    path = str(_saved("host0", 3) / "step-00000003.safetensors")
    errors = _load([path, path, "host1/step-00000003.safetensors", "host1/step-00000003.safetensors"])
    assert [type(error) for error in errors] == [CheckpointError] * 4
    for error, name in zip(errors, [path] * 2 + ["host1/step-00000003.safetensors"] * 2, strict=True):
        assert re.fullmatch(
            rf"replicas cannot resume from the same '{name}': ordinals 0 to 1 on {HOST}: step 3, "
            rf"checksum [0-9a-f]{{8}}; ordinals 2 to 3 on {HOST}: 'host1/step-00000003.safetensors' "
            rf"cannot be read: No such file or directory \(from resume='{name}'\)\. Write checkpoints to a "
            r"file system that all hosts share, or to a URL such as gs://bucket/run, and give all hosts the "
            r"same path\.",
            str(error),
        )


def test_different_checkpoints_of_one_name_are_an_error_in_all() -> None:
    paths = [
        str(_saved(f"host{host}", 3, value=host == 2) / "step-00000003.safetensors") for host in range(4)
    ]
    errors = _load(paths)
    assert [type(error) for error in errors] == [CheckpointError] * 4
    found = re.search(rf": ordinal 0 and 2 more on {HOST}: step 3, checksum (\w+); (.*)", str(errors[0]))
    assert found
    assert re.match(rf"ordinal 2 on {HOST}: step 3, checksum (?!{found[1]})\w+ \(from", found[2])


def test_a_run_does_not_start_again_because_the_first_has_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _saved("host1", 7)
    # These replicas are threads of one process, of which only one would look.
    monkeypatch.setattr(World, "owns_process", True)
    errors = _load(["auto"] * 4, ["host0", "host0", "host1", "host1"])
    for error in errors:
        assert re.search(
            rf"ordinal 0 on {HOST} finds no checkpoint, and ordinal 2 on {HOST} finds "
            r"host1/step-00000007\.safetensors \(from resume='auto'\)",
            str(error),
        )


def test_a_directory_whose_checkpoints_are_all_damaged_is_an_error_in_all() -> None:
    damaged = _saved("shared", 2) / "step-00000002.safetensors"
    damaged.write_bytes(b"")
    errors = _load(["auto"] * 4, ["shared"] * 4)
    assert all("every checkpoint in 'shared' is damaged" in str(error) for error in errors)


def test_a_checkpoint_that_no_replica_can_read_is_reported_as_one_replica_would() -> None:
    errors = _load(["gone.safetensors"] * 4)
    (text,) = {str(error) for error in errors}
    assert text == (
        "'gone.safetensors' cannot be read: No such file or directory (from load). "
        "Name a checkpoint's file that this process may read."
    )


def test_a_file_of_another_program_has_no_step() -> None:
    save([1], "one")
    save([2], "other")
    errors = _load(["one", "one", "one", "other"])
    assert "ordinals 0 to 2" in str(errors[0])
    assert "step None" in str(errors[0])
