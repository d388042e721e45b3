"""What both sides of the mesh service share: protocol version, limits and options."""

from __future__ import annotations

from polyxla_xrt.protocol.channel_options import peer_options

PROTOCOL = 1
"""Version of the messages. Increment it for any change that an older peer would misread."""
MAX_PAYLOAD_BYTES = 1 << 30
"""Largest payload of one participant."""
RENDEZVOUS_TIMEOUT_S = 1800.0
"""Default timeout of a rendezvous, in seconds: a participant may be writing a large checkpoint. A death is
noticed at once, so the timeout only catches processes that hang."""

OPTIONS = peer_options(ping_s=10, silence_s=30)
"""gRPC options of both sides."""

_SHOWN_RANGES = 20


def format_ordinals(ordinals: tuple[int, ...]) -> str:
    """Format sorted ordinals for a message, neighbours as a range: ``0-6, 9``; long lists are cut short."""
    spans: list[tuple[int, int]] = []
    for ordinal in ordinals:
        if spans and ordinal == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], ordinal)
        else:
            spans.append((ordinal, ordinal))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    more = [f"and {len(texts) - _SHOWN_RANGES} more"] if len(texts) > _SHOWN_RANGES else []
    return ", ".join([*texts[:_SHOWN_RANGES], *more])
