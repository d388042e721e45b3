"""A probe describes what is at an address."""

from __future__ import annotations

import socket
import threading

import pytest

from polyxla_xrt.client.probe import look, proxies


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "an HTTP server or a proxy answers there"),
        (b"<!DOCTYPE HTML>", "an HTTP server or a proxy answers there"),
        (
            b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
            "a server there speaks HTTP/2, but did not admit this process in time",
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "the server there does not speak gRPC"),
        (b"hi", "the server there does not speak gRPC"),
        (b"", "something there closes connections"),
    ],
)
def test_a_server_is_recognized_by_its_first_bytes(answer: bytes, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(100)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert look(f"127.0.0.1:{listener.getsockname()[1]}") == says
        thread.join(5)


def test_every_proxy_that_is_set_is_named() -> None:
    found = proxies({"HTTP_PROXY": "a", "https_proxy": "b", "http_proxy": "", "no_proxy": "c"})
    assert found == " https_proxy, HTTP_PROXY is set, but processes of a job connect without a proxy."
    assert proxies({}) == ""
