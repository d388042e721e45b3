"""A host's facts, its address and its worker, from this machine."""

from __future__ import annotations

import os
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from socket import create_server

import pytest

from polyxla.plugin import free_ports
from polyxla.plugin import tpu_env as env
from polyxla_pod.host.facts import gather, node_facts


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


# Reserved for documentation: no machine has it. Source: RFC 5737.
ELSEWHERE = "192.0.2.1"


def test_an_address_of_this_host_is_fine() -> None:
    assert node_facts("127.0.0.1", "127.0.0.1", None, is_alone=False) == {"address": None, "worker": None}


def test_an_address_of_another_host_is_named() -> None:
    found = node_facts(ELSEWHERE, "127.0.0.1", None, is_alone=False)["address"]
    assert found == f"does not have the address {ELSEWHERE}: Cannot assign requested address"


@pytest.mark.parametrize(
    ("own", "first"), [("no-such-host.invalid", "127.0.0.1"), ("127.0.0.1", "x.invalid")]
)
def test_a_name_that_this_host_does_not_know_is_named(own: str, first: str) -> None:
    found = str(node_facts(own, first, None, is_alone=False)["address"])
    unknown = own if own.endswith("invalid") else first
    assert found.startswith(f"does not know the address {unknown}: ")


def test_a_name_for_the_loopback_reaches_no_other_host() -> None:
    # Debian gives a machine's own name 127.0.1.1 in its /etc/hosts.
    found = str(node_facts("localhost", "127.0.0.1", None, is_alone=False)["address"])
    assert found.startswith("takes its name localhost for ")
    assert node_facts("localhost", "localhost", None, is_alone=True)["address"] is None


def test_a_worker_that_accepts_connections_is_there() -> None:
    with closing(create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        assert node_facts("127.0.0.1", "127.0.0.1", port, is_alone=True)["worker"] is None


def test_a_missing_worker_is_named_with_the_reason() -> None:
    (port,) = free_ports(1)
    found = node_facts("127.0.0.1", "127.0.0.1", port, is_alone=True)["worker"]
    assert found == f"127.0.0.1:{port}: Connection refused"
