"""An address has a host and a port, or the error says which is missing."""

from __future__ import annotations

import pytest

from polyxla import UsageError
from polyxla_xrt.config.addresses import join_address, read_address
from polyxla_xrt.config.variables import Variable


def address(text: str) -> tuple[str, int]:
    return read_address(Variable("A", text), text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.2:8470", "10.0.0.2", 8470),
        ("localhost:1", "localhost", 1),
        ("my-node.zone_a.internal:65535", "my-node.zone_a.internal", 65535),
        ("grpc://10.0.0.2:8470", "10.0.0.2", 8470),
        ("[::1]:8470", "::1", 8470),
        ("[fe80::1%eth0]:8470", "fe80::1%eth0", 8470),
        ("grpc://[2001:db8::2]:08470", "2001:db8::2", 8470),
    ],
)
def test_valid_addresses(text: str, host: str, port: int) -> None:
    assert address(text) == (host, port)
    assert address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("text", "what", "like"),
    [
        ("", "'' has no host", "10.0.0.2:8470"),
        (":8470", "$TPU_IP_ADDRESS was probably unset", "10.0.0.2:8470"),
        ("grpc://:8470", "'grpc://:8470' has no host", "10.0.0.2:8470"),
        ("$TPU_IP:8470", "'$TPU_IP' in '$TPU_IP:8470' is not a host", "10.0.0.2:8470"),
        ("a b:1", "'a b' in 'a b:1' is not a host", "10.0.0.2:8470"),
        ("10.0.0.2", "there is no port after '10.0.0.2'", "10.0.0.2:8470"),
        ("10.0.0.2:", "there is no port after '10.0.0.2'", "10.0.0.2:8470"),
        ("[::1]", "there is no port after '[::1]'", "[::1]:8470"),
        ("host:http", "':http' after 'host' is not a port", "host:8470"),
        ("host:-1", "':-1' after 'host' is not a port", "host:8470"),
        ("[::1]8470", "'8470' after '[::1]' is not a port", "[::1]:8470"),
        ("host:8470/", "there is '/' after the port", "host:8470"),
        ("host:8470 # mine", "there is ' # mine' after the port", "host:8470"),
        ("host:8470\n", "there is '\\n' after the port", "host:8470"),
        ("host:0", "the port 0 is not one of 1 to 65535", "host:8470"),
        ("host:65536", "the port 65536 is not one of 1 to 65535", "host:8470"),
        ("host:" + "9" * 5000, "is not one of 1 to 65535", "host:8470"),
        ("::1:8470", "'::1:8470' has too many colons; IPv6 needs brackets", "[::1]:8470"),
        ("fe80::a", "'fe80::a' has too many colons", "[fe80::a]:8470"),
        ("a:1:b", "'a:1:b' has too many colons", "[::1]:8470"),
        ("[nothing]:1", "has no IPv6 address in its brackets", "[::1]:8470"),
        ("[::1:8470", "has no IPv6 address in its brackets", "[::1]:8470"),
        ("http://10.0.0.2:8470", "'http://10.0.0.2:8470' is a URL", "10.0.0.2:8470"),
    ],
)
def test_invalid_addresses(text: str, what: str, like: str) -> None:
    with pytest.raises(UsageError) as wrong:
        address(text)
    assert what in wrong.value.what
    assert wrong.value.where == f"A={text}"
    assert wrong.value.fix == f"Write the address as host:port, such as {like}."
