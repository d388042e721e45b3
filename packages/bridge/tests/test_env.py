"""Environment variables of a bridge process."""

from __future__ import annotations

import ctypes
import os

import pytest

from polyxla_bridge import env
from polyxla_bridge.env import BridgeSettings, CacheOrigin, from_environ


def environ(**values: object) -> dict[str, str]:
    return {f"POLYXLA_BRIDGE_{name.upper()}": str(value) for name, value in values.items()}


def test_the_default_is_one_replica() -> None:
    settings = from_environ({})
    assert settings == BridgeSettings(1, 1, 0, "", cache_origin=CacheOrigin.DEFAULT)
    assert settings.local == (0,)
    assert (settings.platform, settings.kind, settings.stall_timeout_s) == ("CPU", "polyxla CPU", 300)


def test_dynamic_shapes_are_refused() -> None:
    with pytest.raises(
        ValueError, match="XLA_EXPERIMENTAL=nonzero:nms: jaxlib's CPU client compiles no programs"
    ):
        from_environ({env.XLA_EXPERIMENTAL: "nonzero:nms"})


def test_the_stall_timeout_is_read_in_seconds() -> None:
    assert from_environ({env.POLYXLA_STALL_TIMEOUT_S: "1.5"}).stall_timeout_s == 1.5


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("off", (False, 0)),
        ("", (False, 0)),
        ("on", (True, 0)),
        ("4096", (True, 4096)),
        ("3KiB", (True, 3072)),
        ("512MiB", (True, 512 << 20)),
        ("16GiB", (True, 16 << 30)),
    ],
)
def test_the_memory_of_a_device_is_limited(text: str, found: tuple[bool, int]) -> None:
    settings = from_environ({env.POLYXLA_DEVICE_MEMORY: text})
    assert (settings.is_memory_limited, settings.memory_bytes) == found


@pytest.mark.parametrize(
    "name",
    [
        *(env.POLYXLA_CPU_KERNELS, env.POLYXLA_DEVICE_MEMORY, env.POLYXLA_PJRT_OPTIONS),
        *(env.POLYXLA_SHARED_MEMORY, env.POLYXLA_STALL_TIMEOUT_S),
    ],
)
def test_an_empty_variable_counts_as_unset(name: str) -> None:
    assert from_environ({name: ""}) == from_environ({})
    assert env.shares_memory({name: ""})


@pytest.mark.parametrize("text", ["16GB", "1.5GiB", "-1", "chip", "0MiB"])
def test_what_is_no_size_of_a_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"POLYXLA_DEVICE_MEMORY='{text}' is not a valid memory size"):
        from_environ({env.POLYXLA_DEVICE_MEMORY: text})


@pytest.mark.parametrize(
    ("text", "is_readonly"), [("0", False), ("1", True), ("false", False), ("true", True)]
)
def test_the_cache_of_torch_xla_is_used(text: str, is_readonly: bool) -> None:
    assert (from_environ({}).cache_path, from_environ({}).cache_is_readonly) == ("", False)
    asked = {env.XLA_PERSISTENT_CACHE_PATH: "/there", env.XLA_PERSISTENT_CACHE_READ_ONLY: text}
    settings = from_environ(asked)
    assert (settings.cache_path, settings.cache_is_readonly) == ("/there", is_readonly)


@pytest.mark.parametrize(
    ("asked", "origin", "path"),
    [
        ({"HOME": "/me"}, CacheOrigin.DEFAULT, "/me/.cache/polyxla/programs"),
        ({"HOME": "/me", "XDG_CACHE_HOME": "/caches"}, CacheOrigin.DEFAULT, "/caches/polyxla/programs"),
        ({"HOME": "/me", "XDG_CACHE_HOME": "caches"}, CacheOrigin.DEFAULT, "/me/.cache/polyxla/programs"),
        ({"HOME": "/me", "POLYXLA_COMPILE_CACHE": "on"}, CacheOrigin.DEFAULT, "/me/.cache/polyxla/programs"),
        ({"HOME": "/me", "POLYXLA_COMPILE_CACHE": "1"}, CacheOrigin.DEFAULT, "/me/.cache/polyxla/programs"),
        ({"HOME": "/me", "POLYXLA_COMPILE_CACHE": "/mine"}, CacheOrigin.USER, "/mine"),
        ({"HOME": "/me", "POLYXLA_COMPILE_CACHE": "OFF"}, CacheOrigin.OFF, ""),
        ({"HOME": "/me", "POLYXLA_COMPILE_CACHE": "0"}, CacheOrigin.OFF, ""),
        ({"HOME": "/me", "POLYXLA_COMPILE_CACHE": ""}, CacheOrigin.OFF, ""),
        (
            {"XLA_PERSISTENT_CACHE_PATH": "/there", "POLYXLA_COMPILE_CACHE": "/mine"},
            CacheOrigin.PROGRAM,
            "/there",
        ),
        (
            {"XLA_PERSISTENT_CACHE_PATH": "/there", "POLYXLA_COMPILE_CACHE": "off"},
            CacheOrigin.PROGRAM,
            "/there",
        ),
        ({"HOME": ""}, CacheOrigin.DEFAULT, ""),
    ],
    ids=str,
)
def test_the_program_then_the_user_choose_the_cache_directory(
    asked: dict[str, str], origin: CacheOrigin, path: str
) -> None:
    settings = from_environ(asked)
    assert (settings.cache_origin, settings.cache_path) == (origin, path)


def test_only_a_cache_of_the_program_is_read_only() -> None:
    asked = {env.POLYXLA_COMPILE_CACHE: "/mine", env.XLA_PERSISTENT_CACHE_READ_ONLY: "1"}
    assert not from_environ(asked).cache_is_readonly


@pytest.mark.parametrize(
    ("process", "local"), [(0, (0, 1)), (1, (2, 3)), (3, (6, 7))], ids=["first", "second", "last"]
)
def test_processes_hold_equal_numbers_of_replicas(process: int, local: tuple[int, ...]) -> None:
    job = environ(replicas=8, processes=4, process=process, coordinator="127.0.0.1:1")
    with pytest.raises(ValueError, match="4 processes need POLYXLA_SECRET"):
        from_environ(job)
    settings = from_environ({**job, env.POLYXLA_SECRET: "of one job"})
    assert settings.secret == "of one job"
    assert "of one job" not in repr(settings)
    assert settings.local == local


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"replicas": 3, "processes": 2, "coordinator": "h:1"}, "3 replicas cannot be shared equally by 2"),
        ({"replicas": 0}, "0 replicas cannot be shared"),
        ({"replicas": 2, "processes": 2, "process": 2, "coordinator": "h:1"}, "is not in 0..1"),
        ({"replicas": 2}, f"2 replicas need {env.POLYXLA_BRIDGE_COORDINATOR}"),
        ({"replicas": "two"}, "POLYXLA_BRIDGE_REPLICAS='two' is not an integer"),
        ({"replicas": 2, "coordinator": "here"}, "POLYXLA_BRIDGE_COORDINATOR='here' is not host:port"),
        ({"replicas": 2, "coordinator": "here:http"}, "is not host:port"),
    ],
)
def test_invalid_values_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        from_environ(environ(**values))


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_an_invalid_stall_timeout_is_refused(text: str) -> None:
    asked = {env.POLYXLA_STALL_TIMEOUT_S: text}
    for read in (from_environ, env.stall_timeout_s):
        with pytest.raises(
            ValueError, match=r"POLYXLA_STALL_TIMEOUT_S='.*' is not a number of seconds above 0"
        ):
            read(asked)


def test_the_stall_timeout_may_be_infinite() -> None:
    assert env.stall_timeout_s({env.POLYXLA_STALL_TIMEOUT_S: "inf"}) == float("inf")


def test_a_variable_that_is_set_in_c_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYXLA_BRIDGE_HOST", "python")
    assert env.own_environ()["POLYXLA_BRIDGE_HOST"] == "python"
    libc = ctypes.CDLL(None)
    assert libc.setenv(b"POLYXLA_BRIDGE_HOST", "größer=c".encode(), 1) == 0
    assert os.environ["POLYXLA_BRIDGE_HOST"] == "python"
    assert env.own_environ()["POLYXLA_BRIDGE_HOST"] == "größer=c"
