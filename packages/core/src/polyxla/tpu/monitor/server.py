"""The monitor of a host's launch, a thread of the launching process.

Its replica processes connect to it and give accounts of their replicas. On a slice of several hosts, the
monitors connect to the one of host 0 and pass the accounts on, so that host 0 decides for all. They also tell
it how their host's launch ends: a host that fails, or whose launching process goes away, ends all others.
Host 0 ends that when its own replicas have returned.

Anyone may connect. A connection that does not soon prove that it knows the job's secret is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from polyxla.console import INTERRUPTED, say
from polyxla.env import POLYXLA_SECRET, POLYXLA_STALL_TIMEOUT_S, POLYXLA_START_TIMEOUT_S, timeout_s
from polyxla.errors import PolyxlaError, ReplicaLostError, UsageError
from polyxla.launcher.ports import LOCALHOST
from polyxla.tpu import env
from polyxla.tpu.monitor.connection import Message, SealedConnection
from polyxla.tpu.monitor.stalls import Account, Accounts

TICK_S = 0.25
"""How often the monitor looks for stalls and for host 0, in seconds."""
CONNECT_S = 2.0
"""Longest wait of one attempt to connect to host 0, in seconds."""
PROOF_S = 5.0
"""Longest wait for the first message of a connection, in seconds."""
MOST_UNPROVED = 64
"""Largest number of connections that have sent no message yet. The next one takes the place of the oldest."""


NOTICE_S = 2.0
"""How long a failed launch waits for notice of another host's failure, which may be its cause, in s."""


@dataclass(frozen=True)
class HostFailure:
    """The failed launch of a host.

    Attributes:
        host: its number.
        code: its exit code.
        text: what failed, with the host's name.
    """

    host: int
    code: int
    text: str

    def error(self) -> ReplicaLostError:
        """Return the error that ends other hosts' launches, with the same exit code."""
        error = ReplicaLostError(self.text)
        error.exit_code = self.code
        return error


@dataclass(frozen=True)
class Hosts:
    """The hosts of a slice that each launch their own processes.

    Attributes:
        names: in the order of their worker ids; one where a single launch starts all processes.
        own: this host's number.
        port: on which host 0 listens for the others' monitors.
        slices: number of TPU slices, each with as many of the hosts. Of other slices' hosts, only the name of
            host 0 is known.
    """

    names: tuple[str, ...]
    own: int
    port: int
    slices: int = 1

    @property
    def first(self) -> str:
        """The address of host 0's monitor."""
        return f"{self.names[0]}:{self.port}"

    def named(self, host: int) -> str:
        """Return how messages name a host."""
        name = f" ({self.names[host]})" if self.names[host] else ""
        if self.slices == 1:
            return f"host {host}{name}"
        slice_id, own = divmod(host, len(self.names) // self.slices)
        return f"host {own} of slice {slice_id}{name}"


class Monitor:
    """The thread that monitors one launch.

    Args:
        hosts: those of the slice.
        secret: the job's, the same on all hosts.
        stall_timeout_s: longest wait of a replica for others, in seconds.
        start_timeout_s: after so many seconds, hosts that have not connected are reported.

    Attributes:
        address: where the replica processes of this host connect, ``host:port``.
        failure: the failure of another host, if there was one.
    """

    def __init__(self, hosts: Hosts, secret: str, stall_timeout_s: float, start_timeout_s: float) -> None:
        self.failure: HostFailure | None = None
        self._secret = secret
        self._failed = threading.Event()
        self._hosts = hosts
        self._accounts = Accounts(stall_timeout_s)
        self._selector = selectors.DefaultSelector()
        # Connections without a message, each with the time when it is dropped, in the order of arrival.
        self._unproved: dict[SealedConnection, float] = {}
        self._processes: list[SealedConnection] = []
        self._others: dict[SealedConnection, int] = {}
        self._connected: set[int] = {hosts.own}
        # The connection to host 0, until host 0 has welcomed this host.
        self._joining: SealedConnection | None = None
        self._is_decided = False
        self._report_at: float | None = time.monotonic() + start_timeout_s
        # Replica processes of this host come by the loopback address; only hosts come from outside.
        local = self._listen(LOCALHOST, 0)
        self.address = f"{LOCALHOST}:{local.getsockname()[1]}"
        if len(hosts.names) > 1 and hosts.own == 0:
            self._listen_for_hosts()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="polyxla-monitor", daemon=True)
        self._thread.start()

    def wait_for_failure(self, timeout_s: float) -> HostFailure | None:
        """Return the failure of another host, if one is reported within `timeout_s` seconds."""
        self._failed.wait(timeout_s)
        return self.failure

    def close(self, failure: HostFailure | None) -> None:
        """Stop, and tell the other hosts how this one's launch has ended.

        Args:
            failure: its failure; None if it has succeeded, or if another host's failure has ended it.
        """
        self._stop.set()
        self._thread.join()
        for other in self._others:
            if failure:
                _send(other, "failed", **asdict(failure))
            else:
                _send(other, "finished", returned=self._accounts.returned)
            other.finish()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _listen(self, host: str, port: int) -> socket.socket:
        listener = socket.create_server((host, port), backlog=512)
        # A connection that is gone again must not block the thread.
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        return listener

    def _listen_for_hosts(self) -> None:
        try:
            try:
                self._listen(self._hosts.names[0], self._hosts.port)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                # The name is not an address of this machine, as in a container with a network of its own.
                self._listen("", self._hosts.port)
        except OSError as error:
            self._report_at = None
            say(
                f"cannot listen on port {self._hosts.port}, where hosts learn of each other's failure: "
                f"{error.strerror or error}. {env.POLYXLA_MONITOR_PORT} sets another, on all hosts"
            )

    def _serve(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(TICK_S):
                if isinstance(key.fileobj, SealedConnection):
                    self._read(key.fileobj)
                else:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
            self._drop_strangers()
            self._connect_to_first()
            self._report_missing()
            self._look_for_stalls()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection = SealedConnection.accept(listener, self._secret)
            if len(self._unproved) >= MOST_UNPROVED:
                self._drop(next(iter(self._unproved)))
            self._unproved[connection] = time.monotonic() + PROOF_S
            self._selector.register(connection, selectors.EVENT_READ)

    def _drop_strangers(self) -> None:
        now = time.monotonic()
        for connection in [stranger for stranger, until in self._unproved.items() if until < now]:
            self._drop(connection)

    def _connect_to_first(self) -> None:
        if self._hosts.own == 0 or 0 in self._connected or self._joining or self._report_at is None:
            return
        with contextlib.suppress(OSError):
            first = SealedConnection.open(self._hosts.first, self._secret, CONNECT_S)
            first.send("host", host=self._hosts.own)
            self._joining = first
            self._selector.register(first, selectors.EVENT_READ)

    def _welcome(self, connection: SealedConnection, host: int) -> None:
        """Take the connection of another host's monitor, once.

        A second one belongs to that host's next launch, which has started before this one has ended. It is
        refused, and comes again.
        """
        if host not in range(len(self._hosts.names)) or host in self._connected:
            raise ValueError(f"host {host} is connected already, or does not exist")
        _send(connection, "welcome")
        self._add_host(connection, host)

    def _add_host(self, connection: SealedConnection, host: int) -> None:
        self._others[connection] = host
        self._connected.add(host)
        if self.failure:
            _send(connection, "failed", **asdict(self.failure))

    def _report_missing(self) -> None:
        if self._report_at is None or time.monotonic() < self._report_at:
            return
        self._report_at = None
        wanted = range(len(self._hosts.names)) if self._hosts.own == 0 else [0]
        if missing := [self._hosts.named(host) for host in wanted if host not in self._connected]:
            say(
                f"no connection between {self._hosts.named(self._hosts.own)} and {', '.join(missing)} on "
                f"port {self._hosts.port} yet: they do not learn of each other's failure. All hosts need the "
                f"same {POLYXLA_SECRET}"
            )

    def _read(self, connection: SealedConnection) -> None:
        if connection.fileno() < 0:
            # It was dropped to make room for another, in the same round of the selector.
            return
        try:
            messages = connection.receive()
            if messages:
                self._unproved.pop(connection, None)
            for message in messages:
                self._take(connection, message)
        except (OSError, ValueError, TypeError, KeyError):
            self._drop(connection)

    def _take(self, connection: SealedConnection, message: Message) -> None:
        kind = message.pop("kind")
        if kind == "process":
            self._processes.append(connection)
            if self.failure:
                _send(connection, "failed", **asdict(self.failure))
        elif kind == "host":
            self._welcome(connection, int(message["host"]))
        elif kind == "welcome" and connection is self._joining:
            self._joining = None
            self._add_host(connection, 0)
        elif kind == "account":
            self._take_account(message, self._others.get(connection, self._hosts.own))
        elif kind == "failed" and connection in self._others:
            self._fail(HostFailure(**message))
        elif kind == "stalled":
            self._tell_processes(kind, **message)
        elif kind == "finished":
            self._finish(connection, message["returned"])

    def _take_account(self, message: Message, host: int) -> None:
        # Copy it, because the message itself is passed on to host 0.
        fields = dict(message)
        self._accounts.add(int(fields.pop("ordinal")), Account(**fields), self._where(host))
        if self._hosts.own != 0:
            for first in self._others:
                _send(first, "account", **message)

    def _finish(self, connection: SealedConnection, returned: list[int]) -> None:
        # Without host 0, this host decides for itself from now on.
        host = self._others.pop(connection)
        for ordinal in returned:
            self._accounts.add(ordinal, Account(in_device=False, has_returned=True), self._where(host))

    def _where(self, host: int) -> str:
        """Return how accounts name a host; empty if it is the only one."""
        return self._hosts.named(host) if len(self._hosts.names) > 1 else ""

    def _drop(self, connection: SealedConnection) -> None:
        self._selector.unregister(connection)
        connection.close()
        self._unproved.pop(connection, None)
        if connection is self._joining:
            # That was host 0's previous launch, which has ended; connect again.
            self._joining = None
        if connection in self._processes:
            # The launching process itself reports the end of a process.
            self._processes.remove(connection)
        host = self._others.pop(connection, None)
        if host is not None:
            self._fail(
                HostFailure(host, 1, f"{self._hosts.named(host)} is gone: its launching process ended")
            )

    def _fail(self, failure: HostFailure) -> None:
        # Only the first failure counts: the others follow from it.
        if self.failure or failure.host == self._hosts.own:
            return
        self.failure = failure
        self._failed.set()
        self._tell_processes("failed", **asdict(failure))
        if self._hosts.own == 0:
            for other, host in self._others.items():
                if host != failure.host:
                    _send(other, "failed", **asdict(failure))

    def _tell_processes(self, kind: str, **fields: object) -> None:
        for process in self._processes:
            _send(process, kind, **fields)

    def _look_for_stalls(self) -> None:
        # With a connection to host 0, that one decides: it alone knows all accounts.
        if self._is_decided or 0 in self._others.values():
            return
        if stall := self._accounts.stall():
            self._is_decided = True
            for connection in [*self._processes, *self._others]:
                _send(connection, "stalled", waiting=stall.waiting, text=stall.text)


def _send(connection: SealedConnection, kind: str, **fields: object) -> None:
    # An end that is gone is noticed when it is read.
    with contextlib.suppress(OSError):
        connection.send(kind, **fields)


@contextlib.contextmanager
def monitored(
    names: Sequence[str], own: int, environ: Mapping[str, str], slices: int = 1
) -> Iterator[dict[str, str]]:
    """Monitor what runs in the context: the launch of one host's replica processes.

    Yields the variables by which they find the monitor.

    Args:
        names: the hosts that each launch their processes, in the order of their worker ids; empty to monitor
            nothing.
        own: this host's number.
        environ: the environment with the job's secret, the timeouts and the port.
        slices: number of TPU slices, each with as many of the hosts.

    Raises:
        ReplicaLostError: another host has failed; with that host's exit code.
        UsageError: a variable is invalid.
    """
    if not names:
        yield {}
        return
    # A single launch that emulates all hosts is one host here.
    hosts = Hosts(tuple(names), own, _port(environ), slices if len(names) > 1 else 1)
    limits = [timeout_s(environ, name) for name in (POLYXLA_STALL_TIMEOUT_S, POLYXLA_START_TIMEOUT_S)]
    monitor = Monitor(hosts, environ[POLYXLA_SECRET], *limits)
    failure: HostFailure | None = None
    try:
        yield {env.POLYXLA_MONITOR: monitor.address}
    except BaseException as error:
        # This host's error may only follow from another host's, whose notice takes a moment to arrive; a
        # signal that it has received does not.
        cause = monitor.wait_for_failure(NOTICE_S if len(names) > 1 else 0.0)
        if cause and isinstance(error, Exception):
            raise cause.error() from None
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        failure = HostFailure(own, _exit_code(error), f"{hosts.named(own)} failed: {text}")
        raise
    finally:
        monitor.close(failure)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, PolyxlaError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _port(environ: Mapping[str, str]) -> int:
    text = environ.get(env.POLYXLA_MONITOR_PORT) or str(env.DEFAULT_MONITOR_PORT)
    port = int(text) if text.isascii() and text.isdecimal() else 0
    if not 0 < port < 1 << 16:
        raise UsageError(
            f"{text} is not the number of a port",
            where=f"{env.POLYXLA_MONITOR_PORT}={text}",
            fix=f"Write a number such as {env.DEFAULT_MONITOR_PORT}, the same on all hosts, or unset it.",
        )
    return port
