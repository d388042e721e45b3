"""gRPC connections of a job: options for sizes, keepalive and reconnection; and the chunks of messages."""

from __future__ import annotations

import resource
from collections.abc import Iterator

CHUNK_BYTES = 1 << 20
"""Largest chunk of an array, a program or a payload in one message."""


def chunks(data: bytes | memoryview) -> Iterator[tuple[memoryview, bool]]:
    """Yield the chunks of `data`, each with whether it is the last. Empty data yields one empty chunk."""
    view = memoryview(data)
    last = max(len(view) - 1, 0) // CHUNK_BYTES
    for number in range(last + 1):
        yield view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES], number == last


Options = tuple[tuple[str, int], ...]

CLIENT_OPTIONS: Options = (
    # Services are reached directly: a proxy would answer in their place.
    ("grpc.enable_http_proxy", 0),
    # gRPC backs off for up to two minutes by default. A process that is replaced is back within seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name, this is the time that one attempt to connect may take. On a busy host, a server
    # needs seconds to answer. Source: gRPC 1.85, ``src/core/client_channel/subchannel.cc``.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two clients in one process are two peers, each with its own connection.
    ("grpc.use_local_subchannel_pool", 1),
)
"""Options of every client, in addition to those of its service."""

MOST_CONNECTIONS = 1024
"""Maximum number of connections to one server, unless its own peers need more."""


def server_options(peers: int) -> Options:
    """Return the options of a server, in addition to those of its service.

    Third parties can connect, too. A connection that sends nothing, or has no call, is closed, and all
    connections together leave half of the process's file descriptors for its work.

    Args:
        peers: number of connections that the service itself needs.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = MOST_CONNECTIONS if descriptors == resource.RLIM_INFINITY else descriptors // 2
    return (
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 30_000),
        # Clients ping while they wait; by default a server closes the connection at the third ping.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_allowed_incoming_connections", max(2 * peers, min(half, MOST_CONNECTIONS))),
    )


def peer_options(ping_s: int, silence_s: int) -> Options:
    """Return the options that both sides of a service share.

    A closed socket shows at once that a process died. Pings find a host that vanished and a process that is
    frozen: its kernel still answers, but it does not.

    Args:
        ping_s: seconds between pings.
        silence_s: seconds without any answer after which a peer is lost.
    """
    timeout_ms = (silence_s - ping_s) * 1000
    return (
        # A batch has about one chunk, so this leaves room, and no peer can send a message that fills the
        # memory.
        ("grpc.max_send_message_length", 4 * CHUNK_BYTES),
        ("grpc.max_receive_message_length", 4 * CHUNK_BYTES),
        ("grpc.keepalive_time_ms", ping_s * 1000),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        # A peer without a call, or without data to send, must be found dead as well; by default gRPC then
        # stops its pings.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
