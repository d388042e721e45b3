"""Whether a call comes from a client of ours: its headers must have the token."""

from __future__ import annotations

import hmac
from typing import Any


def is_right(details: Any, token: str) -> bool:
    """Return whether a call has the token.

    The comparison takes constant time: its duration must not reveal how many characters match.

    Args:
        details: gRPC's details of the call.
        token: the token.
    """
    return hmac.compare_digest(_given(details).encode(), f"Bearer {token}".encode())


def problem(details: Any, service: str) -> str:
    """Return why a call is rejected.

    Args:
        details: gRPC's details of the call.
        service: what the token is for.
    """
    return (
        "the token is wrong" if _given(details) else f"this {service} requires a token, and the call has none"
    )


def _given(details: Any) -> str:
    return str(dict(details.invocation_metadata).get("authorization", ""))
