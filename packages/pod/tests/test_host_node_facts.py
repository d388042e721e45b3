"""A host's address and worker, from this machine."""

from __future__ import annotations

from contextlib import closing
from socket import create_server

import pytest

from polyxla.plugin import free_ports
from polyxla_pod.host.facts import node_facts

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
