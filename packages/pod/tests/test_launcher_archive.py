"""Which files of a directory are copied."""

from __future__ import annotations

import io
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
    git = ["git", "-C", str(directory)]
    subprocess.run([*git, "init", "-q"], check=True)
    (directory / ".gitignore").write_text("runs\n.venv\n__pycache__\n")
    subprocess.run([*git, "add", "train.py"], check=True)
    assert packed(directory) == [".gitignore", "data/a", "train.py"]
    (directory / "train.py").unlink()
    assert packed(directory) == [".gitignore", "data/a"]


def test_a_file_is_no_directory(directory: Path) -> None:
    with pytest.raises(UsageError, match="there is no directory"):
        pack(directory / "train.py", io.BytesIO())
