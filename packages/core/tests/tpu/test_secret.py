"""The job's secret: who has it, and what its seal proves."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyxla.env import POLYXLA_SECRET
from polyxla.tpu.secret import derived, sealed, unsealed, with_secret


def test_each_launch_on_one_host_has_its_own(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "A": "1"}
    made = [with_secret(environ) for _ in range(2)]
    assert made[0][POLYXLA_SECRET] != made[1][POLYXLA_SECRET]
    assert [environ["A"] for environ in made] == ["1", "1"]
    assert not list(tmp_path.iterdir()), "nothing is written for it"


def test_launches_of_one_user_on_one_machine_agree(tmp_path: Path) -> None:
    one, same, other = (
        with_secret({"HOME": str(home)}, launches=2)[POLYXLA_SECRET]
        for home in (tmp_path / "a", tmp_path / "a", tmp_path / "b")
    )
    assert one == same != other
    (key,) = (tmp_path / "a").rglob("key")
    assert key.read_bytes().hex() != one, "the key itself is in no environment"


@pytest.mark.parametrize("launches", [1, 2])
def test_a_secret_that_the_user_gives_is_kept(launches: int) -> None:
    assert with_secret({POLYXLA_SECRET: "given"}, launches) == {POLYXLA_SECRET: "given"}


def test_a_seal_is_of_one_secret_one_place_and_one_content() -> None:
    data = sealed("secret", "here", b"content")
    assert unsealed("secret", "here", data) == b"content"
    assert unsealed("secret", "", sealed("secret", "", b"")) == b""
    forged = derived("other", "here", b"content").encode() + b"content"
    others = [(data[:-1], "here"), (data + b"x", "here"), (data, "there"), (b"", "here"), (forged, "here")]
    for given, where in [
        *others,
        (b"content", "here"),
        (bytes(64) + b"content", "here"),
        (b"\xff" * 99, "here"),
    ]:
        with pytest.raises(ValueError, match="does not know the job's secret"):
            unsealed("secret", where, given)
