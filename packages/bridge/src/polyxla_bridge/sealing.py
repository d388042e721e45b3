"""Seals by which the processes of a job recognise each other's messages, made with the job's secret."""

from __future__ import annotations

import hmac

SEAL_BYTES = 64
"""Length of a seal: HMAC with SHA-256, in hexadecimal."""


def sealed(secret: str, where: str, data: bytes) -> bytes:
    """Return data behind its seal, for `unsealed`.

    Args:
        secret: the job's.
        where: the key under which the data is stored, or what the data is. The seal is valid nowhere else.
        data: any bytes.
    """
    return _seal(secret, where, data) + data


def unsealed(secret: str, where: str, data: bytes) -> bytes:
    """Return the data that `sealed` got for the same place. Unverified data is never parsed.

    Raises:
        ValueError: the writer does not know the secret, or wrote it for another place.
    """
    given, content = data[:SEAL_BYTES], data[SEAL_BYTES:]
    # The time of a plain comparison would tell a third party how much of a guessed seal is right.
    if not hmac.compare_digest(given, _seal(secret, where, content)):
        raise ValueError(f"{where} is not from a process of this job")
    return content


def _seal(secret: str, where: str, data: bytes) -> bytes:
    # The zero byte ends the place, so that no other place and data give the same bytes.
    return hmac.digest(secret.encode(), where.encode() + b"\0" + data, "sha256").hex().encode()
