"""A damaged file is refused with a clear error: never a crash, never a silent difference."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyxla_training.checkpoint import (
    CheckpointError,
    DamagedCheckpointError,
    load,
    safetensors_header,
    save,
)

STATE = {
    "model": {"weight": torch.arange(12.0).view(3, 4), "flag": torch.tensor(True)},
    "step": 7,
    "x": [0.5],
}
Write = Callable[[bytes], Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "state"
    save(STATE, path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Make a file of these bytes."""
    path = tmp_path_factory.mktemp("written") / "state"

    def write(content: bytes) -> Path:
        path.write_bytes(content)
        return path

    return write


def _said(path: Path) -> str:
    with pytest.raises(DamagedCheckpointError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    return caught.value.what


def test_a_file_that_is_cut_short_anywhere_is_refused(whole: bytes, written: Write) -> None:
    for size in range(len(whole)):
        assert "is damaged, or is not a checkpoint" in _said(written(whole[:size]))
    assert "is cut short: its tensors need 49 bytes and there are 48" in _said(written(whole[:-1]))
    assert "ends within its header" in _said(written(whole[:100]))
    assert "continues after its end" in _said(written(whole + b"x"))


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(
    written: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save([torch.ones(2**20)], tmp_path / "big")
    path = written((tmp_path / "big").read_bytes())
    read = safetensors_header.read

    def read_and_cut(*arguments: Any) -> safetensors_header.Header:
        found = read(*arguments)
        os.truncate(path, 1000)
        return found

    monkeypatch.setattr(safetensors_header, "read", read_and_cut)
    assert "it was cut short while it was read" in _said(path)


def test_a_changed_bit_in_any_byte_is_refused(whole: bytes, written: Write) -> None:
    # Every bit of every byte would take a minute; each byte gets one of the eight.
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        _said(written(bytes(changed)))


@settings(max_examples=300)
@given(
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=8
    )
)
def test_randomly_changed_bytes_are_refused(
    whole: bytes, written: Write, changes: list[tuple[float, int]]
) -> None:
    changed = bytearray(whole)
    for place, bits in changes:
        changed[int(place * len(whole))] ^= bits
    if changed != whole:
        _said(written(bytes(changed)))


def test_a_changed_tensor_is_named_unless_verify_is_off(whole: bytes, written: Write) -> None:
    path = written(whole[:-1] + b"\0")
    assert "tensor 'model.flag' was changed after it was written" in _said(path)
    state = load(path, verify=False)
    assert not state["model"]["flag"]
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])  # type: ignore[index]


@settings(max_examples=200)
@given(content=st.binary(max_size=200))
def test_random_bytes_are_refused(written: Write, content: bytes) -> None:
    for start in (b"", len(content).to_bytes(8, "little")):
        with pytest.raises(CheckpointError):
            load(written(start + content))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, safetensors_header.MAX_HEADER_BYTES + 1])
def test_a_huge_header_is_refused_without_allocating_it(
    written: Write, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(length.to_bytes(8, "little") + b"{}" * 50)
    asked: list[int] = []

    class _Watched(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            asked.append(size or 0)
            return super().read(size)

    monkeypatch.setattr(Path, "open", lambda self, _: _Watched(io.FileIO(self, "r")))
    assert "more than a checkpoint may have" in _said(path)
    assert max(asked) <= 8


def _file(content: Any, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


def _tensor(shape: list[Any], start: Any, stop: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "its header cannot be read"),
        (b"[]", "its header cannot be read"),
        (b"\xff\xfe{}", "its header cannot be read"),
        (b"[" * 50_000, "its header cannot be read"),
        ({"a": 1}, "its header cannot be read"),
        ({"a": {"dtype": "U8"}}, "its header cannot be read"),
        ({"__metadata__": 3}, "its header cannot be read"),
        ({"a": _tensor([4], 0, 4, "F3")}, "tensor 'a' is of dtype 'F3', which is unknown"),
        ({"a": _tensor([4], 0, 4, [])}, "its header cannot be read"),
        ({"a": _tensor([-2, -2], 0, 4)}, "tensor 'a' has an invalid shape or offsets"),
        ({"a": _tensor([4.0], 0, 4)}, "tensor 'a' has an invalid shape or offsets"),
        ({"a": _tensor([True], 0, 1)}, "tensor 'a' has an invalid shape or offsets"),
        ({"a": _tensor([2**30, 2**20], 0, 4)}, "a size that does not fit its shape"),
        ({"a": _tensor([2], 2, 4)}, "does not begin where the one before it ends"),
        ({"a": _tensor([4], 0, 4), "b": _tensor([4], 0, 4)}, "does not begin where the one before it ends"),
        ({"a": _tensor([2**50], 0, 2**50)}, "is cut short"),
        ({"a": _tensor([2], 0, 2)}, "continues after its end"),
    ],
)
def test_invalid_headers_are_refused(written: Write, content: Any, said: str) -> None:
    assert said in _said(written(_file(content, b"1234")))


def test_an_overflowing_shape_of_an_empty_tensor_is_refused(written: Write) -> None:
    _said(written(_file({"a": _tensor([0, 2**62, 2**62], 0, 0)})))


NODES = [
    {"type": "tensor", "name": "nowhere", "dtype": "float32"},
    {"type": "tensor", "name": "a", "dtype": "float64"},
    {"type": "tensor", "name": "a", "dtype": "load"},
    {"type": "tensor", "name": "a", "dtype": "uint8", "view": [[5], [1], 0]},
    {"type": "tensor", "name": "a", "dtype": "uint8", "view": [[2], [1], -1]},
    {"type": "tensor", "name": "a", "dtype": "uint8", "view": 3},
    {"type": "dtype", "value": "os"},
    {"type": "device", "value": "nowhere:9"},
    {"type": "size", "items": ["a"]},
    {"type": "dict", "items": [[[], 1]]},
    {"type": "Counter"},
    {"type": "int", "value": "zz"},
    {"type": "float", "value": "00"},
    {"type": "bytes", "value": "???"},
    {"type": "text", "value": "ff"},
    {"type": "module"},
    {},
]


@pytest.mark.parametrize("node", NODES, ids=str)
def test_a_forged_pytree_is_refused_even_with_right_checksums(written: Write, node: Any) -> None:
    slots = safetensors_header.lay_out([("a", "U8", (4,))])
    start = safetensors_header.encode(slots, json.dumps([node]))
    content = bytearray(start + b"1234")
    sums = safetensors_header.checksums(start, [zlib.crc32(b"1234")])
    content[safetensors_header.CRC_OFFSET : safetensors_header.CRC_OFFSET + len(sums)] = sums
    assert "polyxla did not write its metadata" in _said(written(bytes(content)))


def test_another_version_is_refused_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(safetensors_header, "VERSION", "2")
        save(STATE, tmp_path / "state")
    assert "it was written by a version of polyxla that this one cannot read" in _said(tmp_path / "state")


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._marker), "w"))


def _torch_zip(bomb: object, path: Path) -> None:
    torch.save({"weight": torch.ones(1), "bomb": bomb}, path)


def _torch_legacy(bomb: object, path: Path) -> None:
    torch.save({"weight": torch.ones(1), "bomb": bomb}, path, _use_new_zipfile_serialization=False)


def _plain(bomb: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(bomb, protocol=2))


@pytest.mark.parametrize("write", [_torch_zip, _torch_legacy, _plain])
def test_code_in_a_pickle_never_runs(tmp_path: Path, write: Callable[[object, Path], None]) -> None:
    path, marker = tmp_path / "bomb", tmp_path / "marker"
    write(_Bomb(marker), path)
    with pytest.raises(CheckpointError):
        load(path)
    with pytest.raises(CheckpointError, match="reading it could run any code"):
        load(path, format="torch")
    assert not marker.exists()
    pickle.loads(pickle.dumps(_Bomb(marker))).close()
    assert marker.exists(), "the bomb is one"


@pytest.mark.parametrize("write", [_torch_zip, _torch_legacy])
def test_a_file_of_torch_is_read_only_with_its_format(
    tmp_path: Path, write: Callable[[object, Path], None]
) -> None:
    path = tmp_path / "state.pt"
    write("harmless", path)
    with pytest.raises(CheckpointError, match=r"is a file of torch\.save.*format=\"torch\""):
        load(path)
    assert load(path, format="torch")["bomb"] == "harmless"


def test_a_file_of_torch_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    save(STATE, path, format="torch")
    content = path.read_bytes()
    for size in {*range(0, len(content), 97), 0, 1, len(content) - 1}:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            load(path, format="torch")


def test_a_safetensors_file_is_refused_as_a_file_of_torch(tmp_path: Path) -> None:
    save(STATE, tmp_path / "state")
    with pytest.raises(CheckpointError, match="state"):
        load(tmp_path / "state", format="torch")


def test_a_header_length_like_the_start_of_a_pickle_is_not_mistaken_for_one(tmp_path: Path) -> None:
    # Little-endian lengths of 0x80 and 0x02, 0x80: the first bytes of pickles.
    sizes = set()
    for length in itertools.count(step=8):
        save("x" * length, tmp_path / "state")
        size = int.from_bytes((tmp_path / "state").read_bytes()[:8], "little")
        assert load(tmp_path / "state") == "x" * length
        sizes.add(size)
        if size > 0x280:
            break
    assert 0x280 in sizes


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    for call in (
        lambda name: save({}, tmp_path / "state", format=name),
        lambda name: load(tmp_path, format=name),
    ):
        with pytest.raises(CheckpointError, match="'pickle' is not a checkpoint format"):
            call("pickle")
