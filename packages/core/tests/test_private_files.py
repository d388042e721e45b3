"""The user's private directory: theirs alone, or not used."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polyxla import UsageError
from polyxla.private_files import private_directory, user_key, write_private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def environ(home: Path, temporary: Path) -> dict[str, str]:
    temporary.mkdir(exist_ok=True)
    return {"HOME": str(home), "TMPDIR": str(temporary)}


def test_it_is_made_in_the_home_directory_and_only_the_user_can_enter_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        found = private_directory(environ(tmp_path / "home", tmp_path / "tmp"))
        write_private(found / "file", b"content")
    finally:
        os.umask(before)
    assert found == tmp_path / "home" / ".local" / "state" / "polyxla" / "private"
    assert (mode(found), mode(found / "file"), (found / "file").read_bytes()) == (0o700, 0o600, b"content")
    assert [file.name for file in found.iterdir()] == ["file"]
    assert (
        private_directory({"XDG_STATE_HOME": str(tmp_path), "HOME": "/"}) == tmp_path / "polyxla" / "private"
    )


@pytest.mark.parametrize("home", ["", "relative", "/proc/none"])
def test_without_a_usable_home_it_is_among_the_temporary_files(tmp_path: Path, home: str) -> None:
    found = private_directory({"HOME": home, "TMPDIR": str(tmp_path)})
    assert found == tmp_path / f"polyxla-{os.geteuid()}"
    assert mode(found) == 0o700


def by_a_link(directory: Path, elsewhere: Path) -> None:
    elsewhere.mkdir(mode=0o700)
    directory.symlink_to(elsewhere)


def by_a_fifo(directory: Path, _: Path) -> None:
    os.mkfifo(directory, 0o700)


def by_an_open_directory(directory: Path, _: Path) -> None:
    directory.mkdir()
    directory.chmod(0o755)


def by_another_user(directory: Path, _: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make another user's directory")
    directory.mkdir(mode=0o700)
    os.chown(directory, 12345, 12345)


@pytest.mark.parametrize(
    ("take", "says"),
    [
        (by_a_link, "is not a directory"),
        (by_a_fifo, "is not a directory"),
        (by_an_open_directory, "has mode 755, not 700"),
        (by_another_user, "belongs to user 12345"),
    ],
)
def test_a_name_that_another_user_has_taken_is_refused(tmp_path: Path, take: object, says: str) -> None:
    taken = tmp_path / f"polyxla-{os.geteuid()}"
    assert callable(take)
    take(taken, tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=f"{taken} {says}.*Set XDG_STATE_HOME to a directory of yours"):
        private_directory({"HOME": "", "TMPDIR": str(tmp_path)})
    # It is no obstacle to a user with a home.
    assert private_directory(environ(tmp_path / "home", tmp_path)).is_relative_to(tmp_path / "home")


def test_all_processes_of_a_user_have_one_key(tmp_path: Path) -> None:
    own = environ(tmp_path / "home", tmp_path / "tmp")
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: user_key(own), range(32)))
    assert [len(key) for key in keys] == [32]
    (file,) = private_directory(own).iterdir()
    assert mode(file) == 0o600
    assert user_key(environ(tmp_path / "another", tmp_path / "tmp")) not in keys
