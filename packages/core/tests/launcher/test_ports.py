"""Ports that stay free until a server of the job listens on them."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from polyxla.launcher import ports
from polyxla.launcher.ports import LOCALHOST, free_ports


def test_a_port_is_given_to_nobody_but_a_server_that_asks_for_it() -> None:
    # So many that of the others at least one would get one of them.
    mine = free_ports(2000)
    assert len(set(mine)) == 2000
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((LOCALHOST, 0)))
        others = [stack.enter_context(socket.socket()) for _ in range(300)]
        for other in others:
            other.bind((LOCALHOST, 0))
        others += [stack.enter_context(socket.create_connection(server.getsockname())) for _ in range(100)]
        # gloo's servers set SO_REUSEADDR, and emulated hosts have other addresses of this machine.
        for address in (LOCALHOST, "127.9.9.9"):
            others += [stack.enter_context(socket.create_server((address, 0))) for _ in range(250)]
        assert not {other.getsockname()[1] for other in others} & set(mine)
    # On all addresses, as torch.distributed's store.
    for port in mine[::100]:
        with socket.create_server(("", port)), socket.create_connection((LOCALHOST, port)):
            pass


def test_where_the_system_gives_every_port_one_of_them_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    (tmp_path / "range").write_text("1024\t65535\n")
    (port,) = free_ports(1)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((LOCALHOST, port))
    with socket.create_server(("", port)):
        pass
