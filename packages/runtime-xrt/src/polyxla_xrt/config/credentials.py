"""Files that hold tokens and certificates: those that a setting names, and the token that a worker makes.

A worker on loopback whose user has given it no token makes one. It writes it to the user's private directory,
under its address, where the user's clients find it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from polyxla import UsageError
from polyxla.plugin import private_directory, say_once, write_private
from polyxla_xrt import env
from polyxla_xrt.config.variables import find

MIN_TOKEN_CHARS = 16
"""Minimum length of a token: shorter ones can be guessed."""
_LISTENS = "0A"
"""The state of a listening socket. Source: ``TCP_LISTEN`` in Linux's include/net/tcp_states.h."""


def absolute_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name files of credentials, with absolute paths.

    A script may change its directory, and a connection may be made again at any time.
    """
    names = (
        env.POLYXLA_XRT_TOKEN_FILE,
        env.POLYXLA_XRT_TLS_CA,
        env.POLYXLA_XRT_TLS_CERT,
        env.POLYXLA_XRT_TLS_KEY,
    )
    return {name: str(Path(file.text).absolute()) for name in names if (file := find(environ, name))}


def read_file(path: Path, where: str) -> bytes:
    """Read a file that a setting names.

    Args:
        path: the file.
        where: the setting, as an error names it.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", where=where, fix="Name a file that exists."
        ) from None


def read_token(path: Path, where: str) -> str:
    """Read a token from its file, without surrounding whitespace such as the final newline.

    Args:
        path: the file.
        where: the setting that names it, for errors.

    Raises:
        UsageError: the file cannot be read, or holds no valid token.
    """
    token = read_file(path, where).decode(errors="replace").strip()
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        say_once(f"other users of this machine can read the token in {path}: chmod 600 {path}")
    # Headers of HTTP/2 carry the token, and gRPC takes only printable ASCII there.
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"{path} does not hold a token of at least {MIN_TOKEN_CHARS} printable ASCII characters",
            where=where,
            fix="Make one with: python -c 'import secrets; print(secrets.token_hex(32))'",
        )
    return token


@contextlib.contextmanager
def published(addresses: Sequence[str], token: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Let this user's clients find a token within the context.

    Args:
        addresses: each ``host:port`` on loopback at which it is required.
        token: the token.
        environ: this process's environment.

    Raises:
        UsageError: the user has no private directory.
    """
    files = [file for address in addresses for file in _files(address, environ)]
    for file in files:
        write_private(file, token.encode())
    try:
        yield
    finally:
        for file in files:
            # A later worker at this address may have written its own token, which must stay.
            with contextlib.suppress(OSError):
                if file.read_bytes() == token.encode():
                    file.unlink()


def own_token(address: str, environ: Mapping[str, str]) -> str | None:
    """Return the token that this user's worker at an address has made; None if it has made none.

    Raises:
        UsageError: another user now listens at the port, and would get the token.
    """
    tokens = []
    # A user without a private directory cannot have a worker with a token of its own.
    with contextlib.suppress(UsageError):
        for file in _files(address, environ):
            with contextlib.suppress(OSError):
                tokens.append(file.read_text())
    if tokens:
        # The file of a killed worker stays: whoever has the port now is checked before it gets the token.
        refuse_another_users(address)
    return next(iter(tokens), None)


def refuse_another_users(address: str) -> None:
    """Check that no other user listens at an address, if it is a loopback address.

    Raises:
        UsageError: another user does.
    """
    host, _, port = address.rpartition(":")
    addresses = loopback_addresses(host)
    for user in _listening(addresses, int(port)) if addresses else ():
        if user != os.geteuid():
            raise UsageError(
                f"user {user} of this machine listens at {address}, and this is user {os.geteuid()}",
                where=address,
                fix="Choose another port.",
            )


def loopback_addresses(host: str) -> list[str]:
    """Return the addresses of a host if all are loopback addresses; otherwise an empty list."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = [str(where[0]) for *_, where in found]
    return addresses if all(ipaddress.ip_address(address).is_loopback for address in addresses) else []


def _files(address: str, environ: Mapping[str, str]) -> list[Path]:
    host, _, port = address.rpartition(":")
    if not (found := loopback_addresses(host)):
        return []
    # The name contains the name of the machine, because several machines may share the home directory.
    return [
        private_directory(environ) / f"worker-{socket.gethostname()}-{address}-{port}" for address in found
    ]


def _listening(addresses: Sequence[str], port: int) -> set[int]:
    """Return the users who listen on a port at one of this machine's addresses, or at all of them."""
    users = set()
    for table in ("tcp", "tcp6"):
        # A kernel without IPv6 has no table tcp6.
        with contextlib.suppress(OSError), Path("/proc/net", table).open() as lines:
            for _, local, _, state, _, _, _, user, *_ in (line.split() for line in lines.readlines()[1:]):
                where, _, number = local.partition(":")
                found = _address(where)
                is_there = found.is_unspecified or str(found) in addresses
                if state == _LISTENS and int(number, 16) == port and is_there:
                    users.add(int(user))
    return users


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address as the kernel prints it: in numbers of four bytes each, the last byte first."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    # gRPC serves IPv4 through IPv6 sockets, which the kernel lists with mapped addresses.
    return getattr(found, "ipv4_mapped", None) or found
