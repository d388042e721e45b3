"""What a worker and its clients must agree on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from polyxla_xrt.proto import worker_pb2 as pb

SERVICE = "polyxla.xrt.worker.Worker"
"""The name of the service."""
PROTOCOL = 1
"""Version of the messages. Raised whenever an older peer would misread one."""
CHUNK_BYTES = 1 << 20
"""Largest piece of an array in one command; what is smaller travels together."""
PROGRAM_BYTES = (1 << 31) - 1
"""Largest program: what a protobuf message can hold."""
SILENCE_S = 20
"""How long a peer may be silent, in seconds, before it is lost. A cut of the network of 5 s passes: TCP sends
again after 6.2 s at the latest. A process that dies shows at once, by its closed socket."""

_MESSAGE_BYTES = 4 * CHUNK_BYTES
_PING_S = 5

OPTIONS = (
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _PING_S * 1000),
    ("grpc.keepalive_timeout_ms", (SILENCE_S - _PING_S) * 1000),
    ("grpc.http2.ping_timeout_ms", (SILENCE_S - _PING_S) * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""gRPC's settings of both sides."""


def spell_holder(holder: pb.Holder) -> str:
    """Write who a job belongs to, for a person."""
    return f"{holder.user}@{holder.host} (pid {holder.pid}, {holder.command})"


def chunks(data: memoryview) -> Iterator[tuple[memoryview, bool]]:
    """Cut bytes into pieces; the flag says which is the last. No bytes are one piece as well."""
    last = max(len(data) - 1, 0) // CHUNK_BYTES
    for number in range(last + 1):
        yield data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES], number == last


def array_bytes(width: int, dims: tuple[int, ...]) -> int:
    """Return what an array takes on the wire.

    Args:
        width: bytes of an element.
        dims: its sizes.
    """
    return width * math.prod(dims)
