"""The client against a real server on a free local port."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from polyxla.errors import UsageError
from polyxla.tpu.metadata import (
    MetadataClient,
    MetadataError,
    MetadataKeyError,
    MetadataUnreachableError,
)

TPU_ENV = """\
ACCELERATOR_TYPE: 'v4-16'
CHIPS_PER_HOST_BOUNDS: '2,2,1'
EMPTY:
HOST_BOUNDS: '1,1,2'
WORKER_ID: 1
"""

# "drip" and "drip-head" never end by themselves: a client without a deadline of its own would hang.
ATTRIBUTES = {
    "tpu-env": TPU_ENV,
    "accelerator-type": "v4-16",
    "worker-network-endpoints": "w-0:11:10.164.0.7,w-1:12:10.164.0.8",
    "umlaut": "grün",
}


class Server(ThreadingHTTPServer):
    """Answers like the metadata server, and counts what it is asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.attributes = dict(ATTRIBUTES)
        self.asked: list[str] = []
        self.requests: list[dict[str, str]] = []
        self.closing = threading.Event()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing where a client has gone away: that is what some of these tests are about."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        root = "/computeMetadata/v1/instance/attributes/"
        key = self.path.removeprefix(root)
        self.server.asked.append(key)
        self.server.requests.append(dict(self.headers))
        if key == "drip-head":
            self.drip(b"HTTP/1.0 200 OK\r\nX-Slow: ")
        elif key == "drip":
            self.drip(b"HTTP/1.0 200 OK\r\nMetadata-Flavor: Google\r\n\r\n")
        elif key == "broken":
            self.reply(200, b"half of it", {"Content-Length": "100"})
        elif key == "portal":
            self.reply(200, b"<html>Welcome</html>", {"Metadata-Flavor": ""})
        elif key == "moved":
            self.reply(302, b"", {"Location": f"{root}tpu-env"})
        elif key == "trouble":
            self.reply(503, b"")
        elif key in self.server.attributes:
            self.reply(200, self.server.attributes[key].encode())
        else:
            self.reply(404, b"<html>")

    def reply(self, status: int, body: bytes, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Metadata-Flavor": "Google"} | (extra or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def drip(self, head: bytes) -> None:
        self.wfile.write(head)
        while not self.server.closing.wait(0.02):
            self.wfile.write(b"a")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.closing.set()
        running.shutdown()
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.fixture
def client(server: Server) -> MetadataClient:
    return MetadataClient(server.host)


@pytest.fixture
def closed_port() -> Iterator[str]:
    # A port that is taken, so that nobody else listens at it, refuses connections.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_an_attribute_is_the_text_of_the_answer(client: MetadataClient, server: Server) -> None:
    assert client.attribute("accelerator-type") == "v4-16"
    assert client.attribute("umlaut") == "grün"
    assert server.requests[0]["Metadata-Flavor"] == "Google"


def test_tpu_env_is_a_mapping_of_texts(client: MetadataClient) -> None:
    assert client.tpu_env() == {
        "ACCELERATOR_TYPE": "v4-16",
        "CHIPS_PER_HOST_BOUNDS": "2,2,1",
        "EMPTY": "",
        "HOST_BOUNDS": "1,1,2",
        "WORKER_ID": "1",
    }


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("w-0:11:10.164.0.7,w-1:12:10.164.0.8", ("10.164.0.7", "10.164.0.8")),
        ("unknown:unknown:10.130.0.6\n", ("10.130.0.6",)),
        ("a:1:10.0.0.1:8470, b:2:10.0.0.2:8470", ("10.0.0.1", "10.0.0.2")),
        ("w-0:1:fd00::1,w-1:2:fd00::2", ("fd00::1", "fd00::2")),
        ("a:1:host-1,b:2:host-2", ("host-1", "host-2")),
        ("t1v-n-0a1b-w-0, t1v-n-0a1b-w-1", ("t1v-n-0a1b-w-0", "t1v-n-0a1b-w-1")),
        ("10.0.0.1,10.0.0.2", ("10.0.0.1", "10.0.0.2")),
        ("host.internal:8470", ("host.internal",)),
        ("fd00::1,fd00::2", ("fd00::1", "fd00::2")),
    ],
)
def test_worker_addresses_are_read_from_the_endpoints(
    client: MetadataClient, server: Server, text: str, addresses: tuple[str, ...]
) -> None:
    server.attributes["worker-network-endpoints"] = text
    assert client.worker_addresses() == addresses


@pytest.mark.parametrize("text", ["", "10.0.0.1,", "a:1:10.0.0.1,", "a:1:", "just words", ":8470"])
def test_endpoints_of_another_form_are_refused(client: MetadataClient, server: Server, text: str) -> None:
    server.attributes["worker-network-endpoints"] = text
    with pytest.raises(MetadataError, match="not a list of name:uid:address, or of hosts"):
        client.worker_addresses()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A: 'unfinished", "is not YAML"),
        ("a: b: c", "is not YAML"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
        ("just words", "is not a YAML mapping"),
        ("", "is not a YAML mapping"),
        ("- v4-8", "is not a YAML mapping"),
    ],
)
def test_a_tpu_env_that_is_not_a_mapping_is_refused(
    client: MetadataClient, server: Server, text: str, message: str
) -> None:
    server.attributes["tpu-env"] = text
    with pytest.raises(MetadataError, match=message):
        client.tpu_env()


def test_a_missing_attribute_raises_its_own_error(client: MetadataClient) -> None:
    with pytest.raises(MetadataKeyError, match="has no attribute nothing") as caught:
        client.attribute("nothing")
    assert "TPU_SKIP_MDS_QUERY=1" in caught.value.fix


@pytest.mark.parametrize(("key", "status"), [("trouble", 503), ("moved", 302)])
def test_another_http_status_is_reported(
    client: MetadataClient, server: Server, key: str, status: int
) -> None:
    with pytest.raises(MetadataError, match=f"HTTP status {status}") as caught:
        client.attribute(key)
    assert not isinstance(caught.value, MetadataKeyError | MetadataUnreachableError)
    assert server.asked == [key]


def test_each_attribute_is_requested_once(client: MetadataClient, server: Server) -> None:
    for _ in range(3):
        client.tpu_env()
        client.attribute("accelerator-type")
        with pytest.raises(MetadataKeyError):
            client.attribute("nothing")
    assert server.asked == ["tpu-env", "accelerator-type", "nothing"]


def test_a_slowly_dripping_answer_times_out(server: Server) -> None:
    client = MetadataClient(server.host, timeout_s=0.3)
    with pytest.raises(MetadataError, match="did not finish its answer") as caught:
        client.attribute("drip")
    assert not isinstance(caught.value, MetadataUnreachableError)


def test_slowly_dripping_headers_time_out(server: Server) -> None:
    client = MetadataClient(server.host, timeout_s=0.3)
    with pytest.raises(MetadataUnreachableError, match=r"within 0\.3 s"):
        client.attribute("drip-head")


def test_after_a_timeout_no_more_requests_are_sent(server: Server) -> None:
    client = MetadataClient(server.host, timeout_s=0.3)
    for key in ("drip", "drip", "tpu-env"):
        with pytest.raises(MetadataError, match="did not finish"):
            client.attribute(key)
    assert server.asked == ["drip"]


def test_an_answer_that_breaks_off_is_an_error(client: MetadataClient) -> None:
    with pytest.raises(MetadataError, match="did not finish its answer") as caught:
        client.attribute("broken")
    assert not isinstance(caught.value, MetadataUnreachableError)


def test_a_closed_port_is_reported_as_unreachable(closed_port: str) -> None:
    client = MetadataClient(closed_port)
    with pytest.raises(MetadataUnreachableError, match=f"at {closed_port}") as caught:
        client.attribute("tpu-env")
    assert caught.value.where == f"GCE_METADATA_HOST={closed_port}"
    with pytest.raises(MetadataUnreachableError):
        client.worker_addresses()


def test_an_answer_of_another_server_is_reported_as_unreachable(client: MetadataClient) -> None:
    with pytest.raises(MetadataUnreachableError, match="not a metadata server"):
        client.attribute("portal")


def test_proxies_are_ignored(
    client: MetadataClient, closed_port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{closed_port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert client.attribute("accelerator-type") == "v4-16"


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        ({}, "metadata.google.internal"),
        ({"GCE_METADATA_HOST": ""}, "metadata.google.internal"),
        ({"GCE_METADATA_HOST": "169.254.169.254"}, "169.254.169.254"),
        ({"GCE_METADATA_HOST": "localhost:8080"}, "localhost:8080"),
        ({"GCE_METADATA_HOST": "[fd20:ce::254]:80"}, "[fd20:ce::254]:80"),
    ],
)
def test_the_host_comes_from_a_variable(environ: dict[str, str], host: str) -> None:
    assert MetadataClient.from_environ(environ).host == host


@pytest.mark.parametrize("host", ["http://metadata", "metadata/v1", "a b", "user@host", "host:port"])
def test_a_malformed_host_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="host:port"):
        MetadataClient.from_environ({"GCE_METADATA_HOST": host})


def test_errors_can_be_pickled(closed_port: str) -> None:
    with pytest.raises(MetadataUnreachableError) as caught:
        MetadataClient(closed_port).attribute("tpu-env")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is MetadataUnreachableError
    assert str(again) == str(caught.value)


def test_importing_the_module_imports_no_http_library() -> None:
    heavy = {"requests", "urllib3", "yaml", "torch"}
    code = f"import sys, polyxla.tpu.slices; print({heavy} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"
