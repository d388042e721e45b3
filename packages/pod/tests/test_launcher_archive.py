"""Which files of a directory are copied."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from polyxla import UsageError
from polyxla_pod.launcher.archive import pack


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("train.py", "data/a", ".venv/big", "package/__pycache__/x.pyc", "runs/checkpoint"):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "project"


def packed(directory: Path) -> list[str]:
    file = io.BytesIO()
    pack(directory, file)
    file.seek(0)
    with tarfile.open(fileobj=file) as archive:
        return sorted(member.name for member in archive.getmembers() if member.isfile())


def test_everything_is_copied_but_what_is_made_again(directory: Path) -> None:
    assert packed(directory) == ["data/a", "runs/checkpoint", "train.py"]


def test_of_a_repository_git_decides(directory: Path) -> None:
    run(directory, "init", "-q")
    (directory / ".gitignore").write_text("runs\n.venv\n__pycache__\n")
    run(directory, "add", "train.py")
    assert packed(directory) == [".gitignore", "data/a", "train.py"]
    (directory / "train.py").unlink()
    assert packed(directory) == [".gitignore", "data/a"]


def test_repositories_within_a_repository_are_copied(directory: Path) -> None:
    inner, empty = directory / "third_party/inner", directory / "third_party/not_fetched"
    for place in (inner, empty):
        place.mkdir(parents=True)
        (place / "module.py").write_text("inner")
        run(place, "init", "-q")
        run(place, "add", "module.py")
        run(place, "-c", "user.name=me", "-c", "user.email=me@host", "commit", "-q", "-m", "first")
    (inner / "new.py").write_text("not in git yet")
    run(directory, "init", "-q")
    # As a submodule is: git knows the commit, and not the files.
    run(directory, "add", "third_party/inner", "third_party/not_fetched", "train.py")
    shutil.rmtree(empty)
    empty.mkdir()
    (directory / "nested").mkdir()
    (directory / "nested/too.py").write_text("a repository that the outer one does not know")
    run(directory / "nested", "init", "-q")
    names = packed(directory)
    assert {"third_party/inner/module.py", "third_party/inner/new.py", "nested/too.py"} <= {*names}
    assert not [name for name in names if ".git/" in name or "not_fetched/" in name]


def run(directory: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(directory), *arguments], check=True, capture_output=True)


def test_a_file_is_no_directory(directory: Path) -> None:
    with pytest.raises(UsageError, match="there is no directory"):
        pack(directory / "train.py", io.BytesIO())
