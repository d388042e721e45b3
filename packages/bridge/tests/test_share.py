"""Which replicas a process holds."""

from __future__ import annotations

import pytest

from polyxla_bridge import env
from polyxla_bridge.env import Origin, Share, from_environ


def environ(**values: object) -> dict[str, str]:
    return {f"POLYXLA_BRIDGE_{name.upper()}": str(value) for name, value in values.items()}


def test_nothing_set_is_one_replica() -> None:
    share = from_environ({})
    assert share == Share(1, 1, 0, "", cache_origin=Origin.HOME)
    assert share.local == (0,)
    assert (share.platform, share.kind, share.stall_timeout_s) == ("CPU", "polyxla CPU", 300)


def test_devices_may_say_that_they_are_others() -> None:
    share = from_environ(environ(platform="TPU", kind="TPU v3"))
    assert (share.platform, share.kind) == ("TPU", "TPU v3")


def test_a_wait_has_a_length() -> None:
    assert from_environ({env.POLYXLA_STALL_TIMEOUT_S: "1.5"}).stall_timeout_s == 1.5


@pytest.mark.parametrize(
    ("text", "is_readonly"), [("0", False), ("1", True), ("false", False), ("true", True)]
)
def test_a_cache_is_as_torch_xla_asks_for_it(text: str, is_readonly: bool) -> None:
    assert (from_environ({}).cache_path, from_environ({}).cache_is_readonly) == ("", False)
    asked = {env.XLA_PERSISTENT_CACHE_PATH: "/there", env.XLA_PERSISTENT_CACHE_READ_ONLY: text}
    share = from_environ(asked)
    assert (share.cache_path, share.cache_is_readonly) == ("/there", is_readonly)


@pytest.mark.parametrize(
    ("asked", "origin", "path"),
    [
        ({"HOME": "/me"}, Origin.HOME, "/me/.cache/polyxla/programs"),
        ({"HOME": "/me", "XDG_CACHE_HOME": "/caches"}, Origin.HOME, "/caches/polyxla/programs"),
        ({"HOME": "/me", "XDG_CACHE_HOME": "caches"}, Origin.HOME, "/me/.cache/polyxla/programs"),
        ({"HOME": "/me", "POLYXLA_COMPILE_CACHE": "on"}, Origin.HOME, "/me/.cache/polyxla/programs"),
        ({"HOME": "/me", "POLYXLA_COMPILE_CACHE": "1"}, Origin.HOME, "/me/.cache/polyxla/programs"),
        ({"HOME": "/me", "POLYXLA_COMPILE_CACHE": "/mine"}, Origin.PERSON, "/mine"),
        ({"HOME": "/me", "POLYXLA_COMPILE_CACHE": "OFF"}, Origin.NOBODY, ""),
        ({"HOME": "/me", "POLYXLA_COMPILE_CACHE": "0"}, Origin.NOBODY, ""),
        ({"HOME": "/me", "POLYXLA_COMPILE_CACHE": ""}, Origin.NOBODY, ""),
        ({"XLA_PERSISTENT_CACHE_PATH": "/there", "POLYXLA_COMPILE_CACHE": "/mine"}, Origin.PROGRAM, "/there"),
        ({"XLA_PERSISTENT_CACHE_PATH": "/there", "POLYXLA_COMPILE_CACHE": "off"}, Origin.PROGRAM, "/there"),
        ({"HOME": ""}, Origin.HOME, ""),
    ],
    ids=str,
)
def test_programs_are_kept_where_the_program_or_the_person_says(
    asked: dict[str, str], origin: Origin, path: str
) -> None:
    share = from_environ(asked)
    assert (share.cache_origin, share.cache_path) == (origin, path)


def test_only_the_programs_own_folder_is_read_only() -> None:
    asked = {env.POLYXLA_COMPILE_CACHE: "/mine", env.XLA_PERSISTENT_CACHE_READ_ONLY: "1"}
    assert not from_environ(asked).cache_is_readonly


@pytest.mark.parametrize(
    ("process", "local"), [(0, (0, 1)), (1, (2, 3)), (3, (6, 7))], ids=["first", "second", "last"]
)
def test_processes_hold_equal_shares(process: int, local: tuple[int, ...]) -> None:
    share = from_environ(environ(replicas=8, processes=4, process=process, coordinator="127.0.0.1:1"))
    assert share.local == local


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"replicas": 3, "processes": 2, "coordinator": "h:1"}, "3 replicas cannot be shared equally by 2"),
        ({"replicas": 0}, "0 replicas cannot be shared"),
        ({"replicas": 2, "processes": 2, "process": 2, "coordinator": "h:1"}, "is not in 0..1"),
        ({"replicas": 2}, f"2 replicas need {env.POLYXLA_BRIDGE_COORDINATOR}"),
        ({"replicas": "two"}, "invalid literal"),
        ({"replicas": 2, "coordinator": "here"}, "POLYXLA_BRIDGE_COORDINATOR='here' is not host:port"),
        ({"replicas": 2, "coordinator": "here:http"}, "is not host:port"),
    ],
)
def test_numbers_that_do_not_fit(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        from_environ(environ(**values))
