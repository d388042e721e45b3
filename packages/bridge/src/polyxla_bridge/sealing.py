"""Seals, by which the processes of a job know what they have sent each other. They share the job's secret."""

from __future__ import annotations

import hmac

SEAL_BYTES = 64
"""Length of a seal: HMAC with SHA-256, in hexadecimal."""


def sealed(secret: str, where: str, data: bytes) -> bytes:
    """Return data behind its seal, for `unsealed`.

    Args:
        secret: the job's.
        where: the key under which the data is stored, or what it is: it is valid nowhere else.
        data: any bytes.
    """
    return _seal(secret, where, data) + data


def unsealed(secret: str, where: str, data: bytes) -> bytes:
    """Return what `sealed` was given for the same place. Nothing of it is looked at before.

    Raises:
        ValueError: the writer does not know the secret, or wrote it for another place.
    """
    given, content = data[:SEAL_BYTES], data[SEAL_BYTES:]
    if not hmac.compare_digest(given, _seal(secret, where, content)):
        raise ValueError(f"{where} is not from a process of this job")
    return content


def _seal(secret: str, where: str, data: bytes) -> bytes:
    return hmac.digest(secret.encode(), where.encode() + b"\0" + data, "sha256").hex().encode()
