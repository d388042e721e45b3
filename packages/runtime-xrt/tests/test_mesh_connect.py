"""Connecting to a mesh service fails with the reason: no service, a wrong address, a refusal."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from polyxla import UsageError
from polyxla_xrt.client.mesh import MeshClient
from polyxla_xrt.client.probe import ANSWER_S
from polyxla_xrt.errors import MeshConnectError, MeshRefusedError
from polyxla_xrt.protocol.mesh import PROTOCOL
from polyxla_xrt.server.mesh.server import MeshServer

SECRET = "of one job"

BOUND_S = 20.0
"""Time limit: far below every timeout that would also end the wait, and enough for a busy machine."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def address_of(made: socket.socket) -> str:
    return f"127.0.0.1:{made.getsockname()[1]}"


def connect_error(address: str, environ: dict[str, str] | None = None, wait_s: float = ANSWER_S) -> str:
    begin = time.monotonic()
    with pytest.raises(MeshConnectError) as caught:
        MeshClient(address, 1, 2, SECRET, connect_wait_s=wait_s, environ=environ or {})
    assert time.monotonic() - begin < BOUND_S
    assert f"ordinal 1 finds no mesh service at {address}: " in str(caught.value)
    assert f"XRT_MESH_SERVICE_ADDRESS={address}" in str(caught.value)
    return str(caught.value)


def test_no_listener(listener: socket.socket) -> None:
    address = address_of(listener)
    listener.close()
    text = connect_error(address, {"http_proxy": "http://proxy:1", "HTTPS_PROXY": "", "no_proxy": "x"})
    assert "Connection refused" in text
    assert "http_proxy is set, but processes of a job connect without a proxy." in text
    assert "HTTPS_PROXY" not in text


def test_a_listener_that_never_answers(listener: socket.socket) -> None:
    text = connect_error(address_of(listener))
    assert "something accepts connections there and never answers" in text
    assert "proxy" not in text


def test_an_http_server() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.05,))
        thread.start()
        try:
            assert "an HTTP server or a proxy answers there" in connect_error(
                address_of(web.socket), wait_s=1
            )
        finally:
            web.shutdown()
            thread.join()


def test_a_grpc_server_that_is_not_a_mesh_service() -> None:
    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    try:
        text = connect_error(f"127.0.0.1:{port}")
    finally:
        other.stop(0).wait(5)
    assert "the gRPC server there is not a mesh service" in text


def test_a_host_that_does_not_resolve() -> None:
    assert "its host does not resolve" in connect_error("no-such-host.invalid:8477", wait_s=1)


def test_a_service_that_starts_later_is_waited_for(listener: socket.socket) -> None:
    address = address_of(listener)
    listener.close()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(MeshClient, address, 0, 1, SECRET, connect_wait_s=20)
        time.sleep(0.5)
        server = MeshServer(address, 1, SECRET)
        with waiting.result(20) as client:
            assert client.rendezvous("alone", b"x") == (b"x",)
    assert server.close(5) == ()


def test_a_taken_port_is_a_usage_error(server: MeshServer) -> None:
    with pytest.raises(UsageError, match=r"cannot be bound to 127.*: Address already in use") as caught:
        MeshServer(server.address, 2, SECRET)
    assert f"XRT_MESH_SERVICE_ADDRESS={server.address}" in str(caught.value)
    assert "free port" in caught.value.fix


@pytest.mark.parametrize(
    ("address", "why"),
    [("192.0.2.1:8477", "Cannot assign requested address"), ("no-such-host.invalid:1", "does not resolve")],
)
def test_an_address_of_another_host_is_a_usage_error(address: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        MeshServer(address, 2, SECRET)


def test_another_protocol_or_world_size_or_a_duplicate_ordinal_is_refused(server: MeshServer) -> None:
    with pytest.raises(MeshRefusedError, match=rf"Ordinal 0 speaks protocol 9, the mesh service {PROTOCOL}"):
        MeshClient(server.address, 0, 2, SECRET, protocol=9)
    with pytest.raises(MeshRefusedError, match="Ordinal 0 expects 3 replicas"):
        MeshClient(server.address, 0, 3, SECRET)
    twice = pytest.raises(MeshRefusedError, match="Duplicate ordinal: 0 already attends")
    with MeshClient(server.address, 0, 2, SECRET), twice:
        MeshClient(server.address, 0, 2, SECRET)
