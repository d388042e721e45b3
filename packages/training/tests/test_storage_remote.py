"""Checkpoints in object stores: in fsspec's memory, and on a local server that speaks S3's protocol."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch

from polyxla import UsageError
from polyxla_training import storage
from polyxla_training.checkpoint import (
    BackgroundWriter,
    CheckpointError,
    CheckpointFolder,
    Format,
    check_state,
    load,
    save,
    state_file,
)
from polyxla_training.storage import RemotePath, check_location, locate

if TYPE_CHECKING:
    from conftest import S3Server

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 60.0
PART_BYTES = 5 * 2**20
"""The smallest that S3 accepts."""


def _names(url: str) -> list[str]:
    store, path = fsspec.url_to_fs(url)
    store.invalidate_cache()
    return [name.rpartition("/")[2] for name in store.find(path)]


def _bytes(url: str) -> bytes:
    data: bytes = fsspec.open(url).open().read()
    return data


def _state() -> dict[str, Any]:
    weight = torch.arange(6.0).reshape(2, 3)
    return {
        "tied": [weight, weight.t()],
        "empty": torch.zeros(0),
        "half": torch.ones(3).bfloat16(),
        "step": 7,
    }


@pytest.mark.parametrize("parts", [1, 3], ids=["one-part", "three-parts"])
def test_an_uploaded_file_has_the_bytes_of_a_local_one(
    remote: str, tmp_path: Path, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PART_BYTES", PART_BYTES)
    state = _state() | {"large": torch.randn(parts * PART_BYTES // 4)} if parts > 1 else _state()
    save(state, tmp_path / "state")
    save(state, f"{remote}/state")
    assert _bytes(f"{remote}/state") == (tmp_path / "state").read_bytes()
    check_state(state | {"tied": torch.zeros(1)}, load(f"{remote}/state") | {"tied": torch.zeros(1)})


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_what_is_saved_at_a_url_is_loaded_from_it(remote: str, format: Format) -> None:
    save({"old": 1}, f"{remote}/a/b/state", format=format)
    save(_state(), f"{remote}/a/b/state", format=format)
    found = load(f"{remote}/a/b/state", format=format)
    first, second = found["tied"]
    assert torch.equal(first, _state()["tied"][0])
    assert first.data_ptr() == second.data_ptr()
    assert found["half"].dtype is torch.bfloat16
    assert found["step"] == 7
    assert _names(remote) == ["state"]


def test_other_programs_find_the_object(s3: S3Server, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    save({"weight": torch.arange(3.0)}, "s3://bucket/run/state.safetensors")
    fsspec.filesystem("s3").get_file("bucket/run/state.safetensors", str(tmp_path / "state"))
    assert safetensors.load_file(tmp_path / "state")["weight"].tolist() == [0.0, 1.0, 2.0]


def test_a_directory_of_checkpoints_at_a_url(remote: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CheckpointFolder(f"{remote}/", keep=2)
    assert folder.entries() == []
    assert folder.load_latest() is None
    fsspec.open(f"{remote}/notes.txt", "wb").open().close()
    for step in range(4):
        path = folder.save(step, {"step": step}, keep_forever=step == 0)
        assert str(path).startswith(f"{remote}/step-0000000{step}")
        assert load(path) == {"step": step}
    entries = folder.entries()
    assert [(entry.step, entry.is_kept) for entry in entries] == [(0, True), (2, False), (3, False)]
    assert [entry.size_bytes for entry in entries] == [len(_bytes(str(entry.path))) for entry in entries]
    assert all(abs(entry.time_s - entries[0].time_s) < TIMEOUT_S for entry in entries)
    assert entries[0].time_s > 1e9
    assert "notes.txt" in _names(remote)
    found = folder.load_latest()
    assert found is not None
    assert (found[0].step, found[1]) == (3, {"step": 3})
    assert capsys.readouterr().err == ""


def test_a_torn_object_is_never_loaded(remote: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CheckpointFolder(remote)
    for step in (1, 2, 3):
        folder.save(step, {"step": step, "weight": torch.full((64,), step)})
    for step, stop in ((2, -1), (3, 20)):
        # A store without atomic uploads leaves such a file.
        data = _bytes(f"{remote}/step-0000000{step}.safetensors")
        locate(f"{remote}/step-0000000{step}.safetensors").write_bytes(data[:stop])
    found = folder.load_latest()
    assert found is not None
    assert found[0].step == found[1]["step"] == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.split("'")[1] for line in said] == [
        f"{remote}/step-0000000{step}.safetensors" for step in (3, 2)
    ]


def test_a_changed_bit_is_found(remote: str) -> None:
    save([torch.zeros(4)], f"{remote}/state")
    data = _bytes(f"{remote}/state")
    locate(f"{remote}/state").write_bytes(data[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=rf"'{remote}/state' is damaged"):
        load(f"{remote}/state")


@pytest.mark.slow
def test_a_writer_killed_while_it_uploads_leaves_the_checkpoint_before(
    s3: S3Server, wait_for: Callable[..., None]
) -> None:
    command = [sys.executable, str(PROGRAMS / "upload_twice.py"), "s3://bucket/run"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        guard = threading.Timer(TIMEOUT_S, process.kill)
        guard.start()
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "saved 1\n"
        # The first two of four parts arrive; then there is no answer.
        s3.fail("PUT", 0, after=2)
        process.stdin.write("\n")
        process.stdin.flush()
        wait_for(lambda: len(fsspec.filesystem("s3").list_multipart_uploads("bucket")) == 1)
        process.kill()
        guard.cancel()
    s3.fail("", 0)
    assert _names("s3://bucket/run") == ["step-00000001.safetensors"]
    found = CheckpointFolder("s3://bucket/run").load_latest()
    assert found is not None
    assert found[0].step == 1


def test_a_store_that_is_busy_is_asked_again(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PART_BYTES", PART_BYTES)
    s3.fail("PUT", 503, count=2, after=1)
    save({"large": torch.ones(3 * PART_BYTES // 4)}, "s3://bucket/run/state")
    s3.fail("GET", 503, count=1)
    assert load("s3://bucket/run/state")["large"].sum() == 3 * PART_BYTES // 4


@pytest.mark.parametrize("after", [0, 2], ids=["at-once", "after-two-parts"])
def test_a_refused_upload_is_an_error_with_the_url(
    s3: S3Server, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PART_BYTES", PART_BYTES)
    save({"step": 1}, "s3://bucket/run/state")
    s3.fail("PUT", 403, after=after)
    with pytest.raises(
        CheckpointError, match=r"'s3://bucket/run/state' cannot be written: .*; what was there before is unch"
    ):
        save({"large": torch.ones(4 * PART_BYTES // 4)}, "s3://bucket/run/state")
    s3.fail("", 0)
    assert load("s3://bucket/run/state") == {"step": 1}


def test_the_background_writer_raises_what_an_upload_raised(s3: S3Server) -> None:
    folder = CheckpointFolder("s3://bucket/run")
    writer = BackgroundWriter()
    s3.fail("PUT", 403)
    writer.submit(functools.partial(folder.save, 1), {"step": 1})
    with pytest.raises(
        CheckpointError, match=r"'s3://bucket/run/step-00000001.safetensors' cannot be written"
    ):
        writer.close()
    s3.fail("", 0)
    writer.submit(functools.partial(folder.save, 2), {"step": 2})
    writer.close()
    assert _names("s3://bucket/run") == ["step-00000002.safetensors"]


def test_a_bucket_that_does_not_exist_is_named(s3: S3Server) -> None:
    assert CheckpointFolder("s3://nowhere/run").load_latest() is None
    with pytest.raises(CheckpointError, match=r"'s3://nowhere/run/state' cannot be written: .*bucket"):
        save({}, "s3://nowhere/run/state")
    with pytest.raises(CheckpointError, match=r"'s3://nowhere/run/state' cannot be read"):
        load("s3://nowhere/run/state")


def test_an_old_checkpoint_that_cannot_be_deleted_is_said(
    s3: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = CheckpointFolder("s3://bucket/run", keep=1)
    folder.save(1, [1])
    s3.fail("DELETE", 403)
    folder.save(2, [2])
    said = capsys.readouterr().err
    assert "the old checkpoint s3://bucket/run/step-00000001.safetensors cannot be deleted: " in said
    assert [entry.step for entry in folder.entries()] == [1, 2]


def test_uploads_of_several_threads_do_not_disturb_each_other(remote: str) -> None:
    starts = threading.Barrier(4)

    def upload(number: int) -> None:
        with RemotePath(f"{remote}/{number}").uploading() as file:
            starts.wait(TIMEOUT_S)
            file.write(b"%d" % number)
            if number == 2:
                raise ZeroDivisionError

    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(upload, number) for number in range(4)]
    problems = [type(end.exception()) for end in ends]
    assert [number for number, problem in enumerate(problems) if problem is not type(None)] == [2]
    assert _names(remote) == ["0", "1", "3"]
    assert [_bytes(f"{remote}/{number}") for number in (0, 1, 3)] == [b"0", b"1", b"3"]


def test_a_tensor_that_changes_meanwhile_cancels_the_upload(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.zeros(3)

    def changing(one: torch.Tensor) -> torch.Tensor:
        held = one.clone()
        one += 1
        return held

    monkeypatch.setattr(state_file, "on_host", changing)
    with pytest.raises(
        CheckpointError, match=r"a tensor was changed while it was uploaded to .*BackgroundWriter"
    ):
        save([tensor], f"{remote}/state")
    assert _names(remote) == []


USES: list[Callable[[str], object]] = [
    lambda url: save({}, url),
    load,
    CheckpointFolder,
]


@pytest.mark.parametrize("use", USES, ids=["save", "load", "folder"])
@pytest.mark.parametrize(
    ("scheme", "missing", "advice"),
    [
        ("gs", "gcsfs", r"pip install \S+/training\[gcs\]'$"),
        ("s3", "s3fs", r"pip install \S+/training\[s3\]'$"),
        ("abfs", "adlfs", "pip install adlfs$"),
        ("gs", "fsspec", r"pip install \S+/training\[gcs\]'$"),
        ("abfs", "fsspec", "pip install fsspec$"),
    ],
)
def test_a_missing_package_is_named_with_its_pip_line(
    use: Callable[[str], object],
    scheme: str,
    missing: str,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "fsspec":
        monkeypatch.setitem(sys.modules, "fsspec.registry", None)
    else:
        found = importlib.import_module("fsspec.registry")._registry
        monkeypatch.delitem(found, scheme, raising=False)
    with pytest.raises(UsageError, match=rf"'{scheme}://bucket/run' needs a package .*{advice}"):
        use(f"{scheme}://bucket/run")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"'moon://bucket' is not a URL that fsspec knows.*gs://bucket/directory"
    ):
        check_location("moon://bucket", "here")


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    save([1], f"file://{tmp_path}/with%20space")
    assert load(tmp_path / "with space") == [1]
