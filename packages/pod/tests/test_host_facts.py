"""A host's facts, from this machine."""

from __future__ import annotations

import os
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from socket import create_server

import pytest

from polyxla.plugin import tpu_env as env
from polyxla_pod.host.facts import gather


@pytest.fixture
def environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in env.READ}


def test_versions_space_and_holders_are_there(environ: dict[str, str], tmp_path: Path) -> None:
    found = gather(environ, str(tmp_path / "not" / "yet"), [])
    assert found["versions"]["polyxla-core"] == version("polyxla-core")
    assert all(free > 0 for free in found["free_bytes"].values())
    assert str(tmp_path / "not" / "yet") in found["free_bytes"]
    assert found["holders"] == []


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_on_which_something_listens_is_found(environ: dict[str, str], address: str) -> None:
    try:
        server = create_server((address, 0), family=10 if ":" in address else 2)
    except OSError as error:
        pytest.skip(f"this machine has no {address}: {error}")
    with closing(server):
        port = server.getsockname()[1]
        assert gather(environ, None, [port])["used_ports"] == [port]
    assert gather(environ, None, [port])["used_ports"] == []


@pytest.mark.parametrize(
    ("address", "is_found"), [("127.0.0.3", True), ("0.0.0.0", True), ("127.0.0.4", False)]
)
def test_an_emulated_host_has_the_ports_of_its_own_address(
    environ: dict[str, str], address: str, is_found: bool
) -> None:
    names = {env.TPU_WORKER_HOSTNAMES: "127.0.0.2,127.0.0.3"}
    emulated = {**environ, **names, env.POLYXLA_EMULATE: "v4-16", env.POLYXLA_EMULATE_HOST: "1"}
    with closing(create_server((address, 0))) as server:
        port = server.getsockname()[1]
        assert gather(emulated, None, [port])["used_ports"] == [port] * is_found


def test_the_place_in_an_emulated_slice(environ: dict[str, str]) -> None:
    names = {env.TPU_WORKER_HOSTNAMES: "10.0.0.1,10.0.0.2"}
    emulated = {**environ, **names, env.POLYXLA_EMULATE: "v4-16", env.POLYXLA_EMULATE_HOST: "1"}
    assert gather(emulated, None, [])["worker"] == {"id": 1, "hosts": 2, "type": "v4-16"}
    assert gather({**environ, env.POLYXLA_EMULATE: "v4-16"}, None, [])["worker"] is None
    wrong = {**environ, env.POLYXLA_EMULATE: "v4-17"}
    assert "TPU v4 does not come with 17 cores" in gather(wrong, None, [])["worker"]["error"]


def test_a_host_without_chips_has_no_place(environ: dict[str, str]) -> None:
    assert gather(environ, None, [])["worker"] is None
