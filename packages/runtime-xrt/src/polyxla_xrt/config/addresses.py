"""Addresses: ``host:port``, with IPv6 in brackets. Pure functions over text; nothing is resolved."""

from __future__ import annotations

import ipaddress
import re

from polyxla import UsageError
from polyxla_xrt.config.variables import Variable, parse_integer

DEFAULT_PORT = 8470
"""The default port of a TPU node's worker. Source: Cloud TPU nodes, as in torch_xla 1.13's examples."""
GRPC = "grpc://"
"""An optional prefix of addresses, which is ignored."""

_HOST = re.compile(r"[A-Za-z0-9_.-]+")


def read_address(variable: Variable, text: str) -> tuple[str, int]:
    """Read ``host:port`` from a variable's text; a leading ``grpc://`` is ignored.

    Args:
        variable: the variable, for errors.
        text: the part of its value that is an address.

    Raises:
        UsageError: the host or the port is missing or invalid.
    """
    rest = text.removeprefix(GRPC)
    if "://" in rest:
        raise _invalid_address(variable, f"{text!r} is a URL", rest.rpartition("://")[2])
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        if not bracket or not _is_ipv6(host):
            raise _invalid_address(variable, f"{text!r} has no IPv6 address in its brackets", "[::1]:8470")
    else:
        host, colon, tail = rest.partition(":")
        # A second colon means IPv6 without brackets, where any part could be the port.
        if ":" in tail:
            raise _invalid_address(
                variable, f"{text!r} has too many colons; IPv6 needs brackets", _bracketed(rest)
            )
        tail = colon + tail
        _check_host(variable, text, host)
    return host, _port(variable, join_address(host), tail)


def join_address(host: str, port: int | None = None) -> str:
    """Write a host, in brackets if it is IPv6, and its port."""
    bare = f"[{host}]" if ":" in host else host
    return bare if port is None else f"{bare}:{port}"


def _check_host(variable: Variable, text: str, host: str) -> None:
    if not host:
        raise _invalid_address(
            variable,
            f"{text!r} has no host; a shell variable such as $TPU_IP_ADDRESS was probably unset",
            f"10.0.0.2:{DEFAULT_PORT}",
        )
    if not _HOST.fullmatch(host):
        raise _invalid_address(variable, f"{host!r} in {text!r} is not a host", f"10.0.0.2:{DEFAULT_PORT}")


def _port(variable: Variable, host: str, tail: str) -> int:
    if tail in ("", ":"):
        raise _invalid_address(variable, f"there is no port after {host!r}", f"{host}:{DEFAULT_PORT}")
    match = re.fullmatch(r":([0-9]+)(.*)", tail, re.DOTALL)
    if match is None:
        raise _invalid_address(variable, f"{tail!r} after {host!r} is not a port", f"{host}:{DEFAULT_PORT}")
    digits, junk = match.groups()
    if junk:
        raise _invalid_address(variable, f"there is {junk!r} after the port", f"{host}:{digits}")
    port = parse_integer(digits)
    if port is None or not 1 <= port <= 65535:
        raise _invalid_address(
            variable, f"the port {digits} is not one of 1 to 65535", f"{host}:{DEFAULT_PORT}"
        )
    return port


def _invalid_address(variable: Variable, what: str, like: str) -> UsageError:
    return variable.error(what, f"Write the address as host:port, such as {like}.")


def _bracketed(text: str) -> str:
    host, _, port = text.rpartition(":")
    return f"[{host}]:{port}" if _is_ipv6(host) else f"[{text if _is_ipv6(text) else '::1'}]:{DEFAULT_PORT}"


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
