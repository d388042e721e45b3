"""What both sides of the mesh service share: protocol version, limits and options."""

from __future__ import annotations

from collections.abc import Iterable

from polyxla.plugin import derived
from polyxla_xrt.protocol.channels import peer_options

PROTOCOL = 2
"""Version of the messages. Increment it for any change that an older peer would misread."""
MAX_PAYLOAD_BYTES = 1 << 30
"""Largest payload of one participant."""
SEAL_TRAILER = "polyxla-seal"
"""Metadata behind the list of workers: its seal."""
RENDEZVOUS_TIMEOUT_S = 1800.0
"""Default timeout of a rendezvous, in seconds: a participant may be writing a large checkpoint. A death is
noticed at once, so the timeout only catches processes that hang."""

OPTIONS = peer_options(ping_s=10, silence_s=30)
"""gRPC options of both sides."""

_SHOWN_RANGES = 20


def call_token(secret: str) -> str:
    """Return what every call carries: only the job's processes know it, and it does not reveal the secret."""
    return derived(secret, "call of the mesh")


def payload_of(tag: str, ordinal: int, replicas: Iterable[int]) -> str:
    """Return what a payload's seal is valid for: a participant of a rendezvous."""
    return f"payload of {ordinal} for {sorted(replicas)} at {tag}"


def config_seal(secret: str, config: bytes) -> str:
    """Return the seal of the list of workers."""
    return derived(secret, "workers of the mesh", config)


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
