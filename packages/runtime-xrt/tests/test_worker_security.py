"""A worker accepts clients with the right credentials only; a missing worker is diagnosed."""

from __future__ import annotations

import hmac
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from polyxla import UsageError
from polyxla.plugin import snapshot
from polyxla_xrt.client.channel import WorkerChannel, ask
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.client.probe import SILENT, look
from polyxla_xrt.config import credentials
from polyxla_xrt.env import (
    POLYXLA_XRT_TLS_CA,
    POLYXLA_XRT_TLS_CERT,
    POLYXLA_XRT_TLS_KEY,
    POLYXLA_XRT_TOKEN_FILE,
)
from polyxla_xrt.errors import WorkerConnectError, WorkerError, WorkerRefusedError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.proto import worker_pb2_grpc
from polyxla_xrt.protocol.worker import PROTOCOL, format_holder
from polyxla_xrt.server.worker.security import TokenInterceptor

BOUND_S = 20.0
"""Time within which an error must come, in seconds."""
TOKEN = "0123456789abcdef-right"


class Keys:
    """Files of two authorities: that of the worker and its clients, and an unrelated one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for authority in ("ours", "theirs"):
            self._openssl(
                "req", "-x509", "-keyout", f"{authority}.key", "-out", f"{authority}.pem", cn=authority
            )
        for name, authority in (("worker", "ours"), ("client", "ours"), ("unrelated", "theirs")):
            self._signed(name, authority)

    def _openssl(self, *arguments: str, cn: str) -> None:
        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={cn}"]
        command = ["openssl", *arguments, *new]
        subprocess.run(command, cwd=self._directory, check=True, capture_output=True, timeout=30)

    def _signed(self, name: str, authority: str) -> None:
        host = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
        by = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"]
        out = ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
        self._openssl("req", "-x509", *by, *out, *host, cn=name)

    def __getitem__(self, name: str) -> str:
        return str(self._directory / name)

    def environ(self, ca: str = "ours.pem", client: str | None = "client") -> dict[str, str]:
        pair = {POLYXLA_XRT_TLS_CERT: self[f"{client}.pem"], POLYXLA_XRT_TLS_KEY: self[f"{client}.key"]}
        return {**snapshot(), POLYXLA_XRT_TLS_CA: self[ca], **(pair if client else {})}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


def with_token(directory: Path, token: str) -> dict[str, str]:
    file = directory / "token"
    file.write_text(f"{token}\n")
    return {**snapshot(), POLYXLA_XRT_TOKEN_FILE: str(file)}


@pytest.fixture(scope="module")
def guarded(share_worker: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A worker that requires a token and listens on every address."""
    directory = tmp_path_factory.mktemp("token")
    file = with_token(directory, TOKEN)[POLYXLA_XRT_TOKEN_FILE]
    return share_worker("--address", "0.0.0.0:0", "--token-file", file)


@pytest.fixture(scope="module")
def encrypted(share_worker: Callable[..., Any], keys: Keys) -> Any:
    """A worker that requires client certificates."""
    pair = ["--tls-cert", keys["worker.pem"], "--tls-key", keys["worker.key"]]
    return share_worker(*pair, "--tls-client-ca", keys["ours.pem"])


def refusal(address: str, environ: Mapping[str, str]) -> WorkerError:
    """Check that the lease and the status both fail soon, and return the error."""
    for act in (lambda: Lease(address, 1, environ), lambda: ask(address, "Status", environ)):
        begin = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            act()
        assert time.monotonic() - begin < BOUND_S
        assert address in str(caught.value)
    return caught.value


def served(worker: Any, environ: Mapping[str, str]) -> int:
    status = worker.status(environ)
    assert status["jobs"] == []
    return int(status["jobs_served"])


def lets_in(worker: Any, environ: Mapping[str, str]) -> None:
    with closing(Lease(worker.address, 1, environ)) as lease:
        assert len(lease.job) == 32
    deadline = time.monotonic() + 20
    while worker.status(environ)["jobs"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (None, "this worker requires a token, and the call has none"),
        (TOKEN[:-1], "the token is wrong"),
        (TOKEN + "x", "the token is wrong"),
        (TOKEN.upper(), "the token is wrong"),
    ],
)
def test_a_call_without_the_right_token_has_no_effect(
    guarded: Any, tmp_path: Path, token: str | None, says: str
) -> None:
    right = with_token(tmp_path, TOKEN)
    before = served(guarded, right)
    (tmp_path / "given").mkdir()
    error = refusal(guarded.address, with_token(tmp_path / "given", token) if token else snapshot())
    assert isinstance(error, WorkerRefusedError)
    assert says in str(error)
    assert f"Set {POLYXLA_XRT_TOKEN_FILE} to a file with the same token" in str(error)
    assert served(guarded, right) == before
    assert TOKEN not in guarded.log


def test_a_job_with_the_right_token_is_served(guarded: Any, tmp_path: Path) -> None:
    lets_in(guarded, with_token(tmp_path, TOKEN))


@pytest.mark.parametrize("header", ["", TOKEN, f"bearer {TOKEN}", f"Bearer  {TOKEN}", f"Basic {TOKEN}"])
def test_every_call_requires_the_exact_token(guarded: Any, tmp_path: Path, header: str) -> None:
    metadata = (("authorization", header),)
    attach = pb.Commands(commands=[pb.Command(attach=pb.Attach(protocol=PROTOCOL))])
    with grpc.insecure_channel(guarded.address) as channel:
        stub, health = worker_pb2_grpc.WorkerStub(channel), HealthStub(channel)
        calls: dict[str, Callable[[], Any]] = {
            "Status": lambda: stub.Status(pb.StatusRequest(), timeout=BOUND_S, metadata=metadata),
            "Drain": lambda: stub.Drain(pb.DrainRequest(), timeout=BOUND_S, metadata=metadata),
            "Lease": lambda: next(stub.Lease(pb.LeaseRequest(cores=1), timeout=BOUND_S, metadata=metadata)),
            "Session": lambda: next(stub.Session(iter([attach]), timeout=BOUND_S, metadata=metadata)),
            "Keep": lambda: stub.Keep(iter([pb.KeepRequest()]), timeout=BOUND_S, metadata=metadata),
            "Recall": lambda: next(stub.Recall(pb.RecallRequest(), timeout=BOUND_S, metadata=metadata)),
            "Check": lambda: health.Check(HealthCheckRequest(), timeout=BOUND_S, metadata=metadata),
        }
        assert calls.keys() == {*pb.DESCRIPTOR.services_by_name["Worker"].methods_by_name, "Check"}
        for call in calls.values():
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert guarded.status(with_token(tmp_path, TOKEN))["draining"] is False


@pytest.mark.parametrize("options", [(), ("--jobs", "2")], ids=["alone", "shared"])
def test_processes_that_begin_after_the_token_file_has_changed_require_the_same_token(
    start_worker: Callable[..., Any], tmp_path: Path, options: tuple[str, ...]
) -> None:
    own = tmp_path / "worker"
    own.write_text(TOKEN)
    right = with_token(tmp_path, TOKEN)
    worker = start_worker("--token-file", str(own), *options)
    own.write_text("another-0123456789abcdef")
    lets_in(worker, right)
    os.kill(worker.serving_pid, signal.SIGKILL)
    lets_in(worker, right)


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []

    def compare(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return hmac_compare(one, other)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr("polyxla_xrt.server.refusals.hmac", SimpleNamespace(compare_digest=compare))
    handler = grpc.unary_unary_rpc_method_handler(lambda *_: None)
    interceptor = TokenInterceptor(TOKEN)
    for given in (f"Bearer {TOKEN}", "Bearer x", "é", ""):
        details = SimpleNamespace(invocation_metadata=[("authorization", given)])
        found = interceptor.intercept_service(lambda _: handler, details)
        assert (found is handler) == (given == f"Bearer {TOKEN}")
    wanted = f"Bearer {TOKEN}".encode()
    assert compared == [(given.encode(), wanted) for given in (f"Bearer {TOKEN}", "Bearer x", "é", "")]


def test_a_job_with_the_right_certificates_is_served(encrypted: Any, keys: Keys) -> None:
    lets_in(encrypted, keys.environ())


@pytest.mark.parametrize(
    ("ca", "client"), [("theirs.pem", "client"), ("ours.pem", None), ("ours.pem", "unrelated"), (None, None)]
)
def test_a_call_with_wrong_certificates_has_no_effect(
    encrypted: Any, keys: Keys, ca: str | None, client: str | None
) -> None:
    before = served(encrypted, keys.environ())
    error = refusal(encrypted.address, keys.environ(ca, client) if ca else snapshot())
    assert isinstance(error, WorkerConnectError)
    if ca is None:
        assert f"For a worker with a certificate, set {POLYXLA_XRT_TLS_CA}" in str(error)
    assert served(encrypted, keys.environ()) == before


class BusyWorker(worker_pb2_grpc.WorkerServicer):
    """A worker that answers late."""

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        time.sleep(1)
        return pb.StatusReply(protocol=PROTOCOL, jobs_served=7)


@pytest.mark.parametrize("client", [None, "client"])
def test_a_worker_with_tls_that_is_alive_may_answer_late(keys: Keys, client: str | None) -> None:
    pair = (Path(keys["worker.key"]).read_bytes(), Path(keys["worker.pem"]).read_bytes())
    credentials = grpc.ssl_server_credentials(
        [pair], Path(keys["ours.pem"]).read_bytes(), require_client_auth=client is not None
    )
    server = grpc.server(ThreadPoolExecutor(1))
    worker_pb2_grpc.add_WorkerServicer_to_server(BusyWorker(), server)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    with ExitStack() as stack:
        stack.callback(lambda: server.stop(None).wait(BOUND_S))
        channel = stack.enter_context(closing(WorkerChannel(address, keys.environ(client=client))))
        assert channel.status(timeout_s=0.2).jobs_served == 7


def test_what_accepts_connections_and_encrypts_none_is_named(keys: Keys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert look(f"127.0.0.1:{listener.getsockname()[1]}", keys.environ()) == SILENT


@pytest.mark.slow
def test_tls_to_a_worker_without_tls_fails(worker: Any, keys: Keys) -> None:
    assert isinstance(refusal(worker.address, keys.environ()), WorkerConnectError)
    assert served(worker, snapshot()) == 0


OPEN = "anyone who can reach 0.0.0.0 could use this worker"
ANY = ["--address", "0.0.0.0:0"]
PAIR = ["--tls-cert", "{keys}/worker.pem", "--tls-key", "{keys}/worker.key"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (ANY, OPEN),
        (["--address", "[::]:0"], "anyone who can reach :: could use this worker"),
        ([*ANY, "--token-file", "{directory}/missing"], "cannot be read: No such file"),
        (
            [*ANY, "--token-file", "{directory}/short"],
            "does not hold a token of at least 16 printable ASCII characters",
        ),
        ([*ANY, "--token-file", "{directory}/script"], "does not hold a token of at least 16 printable"),
        (["--tls-cert", "{keys}/worker.pem"], "a certificate needs its key"),
        (
            ["--tls-client-ca", "{keys}/ours.pem"],
            "client certificates need a certificate of the worker",
        ),
        (["--tls-cert", "{keys}/worker.pem", "--tls-key", "{keys}/no"], "cannot be read: No such file"),
        (["--tls-cert", "{keys}/worker.pem", "--tls-key", "{keys}/client.key"], "do not fit together"),
        (["--tls-cert", "{directory}/short", "--tls-key", "{keys}/client.key"], "do not fit together"),
        (
            [*PAIR, "--tls-client-ca", "{directory}/short"],
            "do not fit together",
        ),
    ],
)
def test_an_unsafe_worker_does_not_start(tmp_path: Path, keys: Keys, options: list[str], says: str) -> None:
    (tmp_path / "short").write_text("0123456789abcde\n")
    (tmp_path / "script").write_text("ünsäfe" * 10)
    filled = [option.format(directory=tmp_path, keys=Path(keys["x"]).parent) for option in options]
    command = [sys.executable, "-m", "polyxla", "worker", "--devices", "1", *filled]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_an_insecure_worker_starts_when_requested(start_worker: Callable[..., Any]) -> None:
    lets_in(start_worker(*ANY, "--insecure"), snapshot())


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Listen, and call a function for each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as peers:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    peer = peers.enter_context(server.accept()[0])
                    with suppress(ConnectionError):
                        answer(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(BOUND_S)


def unreachable(address: str, says: str, environ: Mapping[str, str] | None = None) -> None:
    error = refusal(address, {**snapshot(), **(environ or {})})
    assert isinstance(error, WorkerConnectError)
    assert f"there is no worker at {address}: " in str(error)
    assert says in str(error)
    assert "Check that `polyxla worker` is running there" in str(error)


def test_no_listener() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        unreachable(f"127.0.0.1:{probe.getsockname()[1]}", "Connection refused")


def test_a_host_that_does_not_resolve() -> None:
    unreachable("nowhere.invalid:8470", "its host does not resolve")


@pytest.mark.slow
def test_a_listener_that_never_answers() -> None:
    with listening(lambda _: None) as address:
        unreachable(address, "something accepts connections there and never answers")


def test_a_listener_that_closes_connections() -> None:
    with listening(lambda peer: peer.close()) as address:
        unreachable(address, "something there closes connections")


@pytest.mark.slow
def test_a_server_of_another_protocol() -> None:
    with listening(lambda peer: peer.sendall(b"220 mail.example ESMTP ready\r\n")) as address:
        unreachable(address, "the server there does not speak gRPC")


@pytest.mark.slow
def test_an_http_server_and_a_proxy_variable() -> None:
    server = HTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    proxy = {"http_proxy": "http://127.0.0.1:9"}
    unreachable(address, "an HTTP server or a proxy answers there", None)
    unreachable(address, "http_proxy is set", proxy)
    server.shutdown()
    server.server_close()


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


def test_a_grpc_server_that_is_not_a_worker() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    unreachable(f"127.0.0.1:{port}", "the gRPC server there is not a worker")
    server.stop(0)


class Own:
    """A worker on loopback that was given no credentials, and the environments of its user and of another."""

    def __init__(self, start_worker: Callable[..., Any], directory: Path) -> None:
        self.directory = directory / "own"
        self.user, self.other = ({"XDG_STATE_HOME": str(directory / name)} for name in ("own", "other"))
        self.worker = start_worker(is_open=False, **self.user)

    @property
    def files(self) -> list[Path]:
        return [path for path in self.directory.rglob("*") if path.is_file()]


@pytest.fixture
def own(start_worker: Callable[..., Any], tmp_path: Path) -> Own:
    return Own(start_worker, tmp_path)


def test_a_worker_on_loopback_admits_its_own_user_only(own: Own) -> None:
    lets_in(own.worker, own.user)
    (file,) = own.files
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    error = refusal(own.worker.address, own.other)
    assert "this worker requires a token, and the call has none" in str(error)
    with pytest.raises(WorkerRefusedError):
        ask(own.worker.address, "Drain", own.other)
    assert own.worker.status(own.user)["draining"] is False
    assert file.read_text() not in own.worker.log
    # Its client does not tell the token to another user who has taken the port.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        patch.setattr(credentials, "private_directory", lambda _: file.parent)
        with pytest.raises(UsageError, match=r"listens at .*, and this is user 12345"):
            ask(own.worker.address, "Status", own.user)
    own.worker.process.terminate()
    own.worker.process.wait(20)
    assert own.files == []


def test_calls_of_strangers_that_never_send_their_message_take_no_place(own: Own) -> None:
    ended = threading.Event()

    def never() -> Iterator[bytes]:
        ended.wait(60)
        yield from ()

    with grpc.insecure_channel(own.worker.address) as channel:
        # A worker of two cores runs 66 calls at a time: these would occupy all of them.
        names = ("Status", "Lease", "Session", "Drain", "Nothing")
        methods = [channel.stream_unary(f"/polyxla.xrt.worker.Worker/{name}") for name in names]
        calls = [method.future(never(), timeout=BOUND_S) for _ in range(20) for method in methods]
        lets_in(own.worker, own.user)
        refused = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert {call.code() for call in calls} <= refused
        assert all(call.done() for call in calls)
        ended.set()


def test_connections_of_strangers_leave_descriptors_for_the_job(
    start_worker: Callable[..., Any], tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        own = Own(start_worker, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    lets_in(own.worker, own.user)
    host, _, port = own.worker.address.rpartition(":")
    with ExitStack() as stack, closing(Lease(own.worker.address, 1, own.user)) as lease:
        for _ in range(400):
            with suppress(OSError):
                stack.enter_context(socket.create_connection((host, int(port)), 1))
        (serving,) = (
            Path(f"/proc/{own.worker.process.pid}/task/{own.worker.process.pid}/children").read_text().split()
        )
        used = len(list(Path(f"/proc/{serving}/fd").iterdir()))
        assert used < 200
        assert len(lease.job) == 32
    lets_in(own.worker, own.user)


def test_a_token_that_others_can_read_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for mode, says in ((0o600, ""), (0o644, f"chmod 600 {tmp_path / 'token'}")):
        environ = with_token(tmp_path, TOKEN)
        (tmp_path / "token").chmod(mode)
        WorkerChannel("127.0.0.1:1", environ).close()
        found = capfd.readouterr().err
        assert says in found if says else not found


def test_the_owner_of_a_job_is_one_line_that_a_terminal_does_not_obey() -> None:
    holder = pb.Holder(user="u\u202e", host="h\x9b2J", pid=7, command="train.py\x1b]0;x\x07\nlease granted")
    assert format_holder(holder) == r"u\u202e@h\x9b2J (pid 7, train.py\x1b]0;x\x07\nlease granted)"
