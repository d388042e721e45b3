"""What both sides of the mesh service must agree on."""

from __future__ import annotations

from collections.abc import Iterator

PROTOCOL = 1
"""Version of the messages. Raised whenever an older peer would misread one."""
PAYLOAD_BYTES = 1 << 30
"""Largest payload of one participant."""
TIMEOUT_S = 1800.0
"""Longest wait for the others, where the caller names none: one of them may write a large checkpoint. A
death is noticed at once, so this is for those that hang."""
LONGEST_TIMEOUT_S = 7 * 24 * 3600.0
"""Longest wait that may be asked for: for others, or for another job's cores."""

CHUNK_BYTES = 1 << 20
"""Largest piece of a payload in one message."""

_MESSAGE_BYTES = 4 << 20
_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 20_000

OPTIONS = (
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    # A closed socket shows by itself. Pings find a host that vanished; a short cut of the network passes.
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    # Without it a process that is frozen, whose kernel still answers, would not be found.
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""gRPC's settings of both sides."""


def pieces(payload: bytes) -> Iterator[tuple[bytes, bool]]:
    """Cut a payload into messages; the flag says which is the last. An empty one has one as well."""
    last = max(len(payload) - 1, 0) // CHUNK_BYTES
    view = memoryview(payload)
    for number in range(last + 1):
        yield bytes(view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]), number == last


def spell(ordinals: tuple[int, ...]) -> str:
    """Write ordinals for a person, neighbours as a range: ``0-6, 9``; a long list is cut short."""
    spans: list[tuple[int, int]] = []
    for ordinal in ordinals:
        if spans and ordinal == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], ordinal)
        else:
            spans.append((ordinal, ordinal))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    shown = texts if len(texts) <= 20 else [*texts[:20], f"and {len(texts) - 20} more"]
    return ", ".join(shown)
