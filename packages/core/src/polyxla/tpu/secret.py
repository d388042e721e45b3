"""The job's secret, by which its processes know each other. Another user of the machine does not have it.

It is in the environment of the job's processes, which Linux shows to no other user, and never in a command.
Connections carry what it seals, never the secret itself: a process that listens in another's place learns
nothing.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

from polyxla.env import POLYXLA_SECRET
from polyxla.private_files import user_key

SEAL_CHARS = 64
"""Length of a seal: HMAC with SHA-256, in hexadecimal."""


def with_secret(environ: Mapping[str, str], launches: int = 1) -> dict[str, str]:
    """Return an environment with the job's secret.

    Args:
        environ: the environment. If it has a secret, that is kept.
        launches: number of launches that make up the job, one on each host. Several derive the secret from
            the user's key: they agree where they have the same private directory, as on one machine.

    Raises:
        UsageError: there is no private directory for the key.
    """
    if environ.get(POLYXLA_SECRET):
        return dict(environ)
    # A single launch hands its secret on in the environment, so nobody has to find it, and it can be random.
    secret = secrets.token_hex(32) if launches == 1 else shared_secret(environ, "hosts")
    return {**environ, POLYXLA_SECRET: secret}


def shared_secret(environ: Mapping[str, str], purpose: str) -> str:
    """Return a secret that all processes of this user on this machine can find, for one purpose.

    Raises:
        UsageError: there is no private directory for the key that it is derived from.
    """
    return derived(user_key(environ).hex(), purpose)


def sealed(secret: str, where: str, data: bytes) -> bytes:
    """Return data behind its seal, for `unsealed`.

    Args:
        secret: the job's.
        where: what the data is; the seal is valid for nothing else.
        data: any bytes.
    """
    return derived(secret, where, data).encode() + data


def unsealed(secret: str, where: str, data: bytes) -> bytes:
    """Return what `sealed` was given for the same `where`. The seal is checked before anything is read.

    Raises:
        ValueError: the seal is another secret's.
    """
    # compare_digest takes the same time whatever differs, so that a seal cannot be guessed byte by byte.
    given, content = data[:SEAL_CHARS], data[SEAL_CHARS:]
    if not hmac.compare_digest(given, derived(secret, where, content).encode()):
        raise ValueError("the sender does not know the job's secret")
    return content


def derived(secret: str, where: str, data: bytes = b"") -> str:
    """Return a digest that only holders of the secret can compute, and that does not reveal it."""
    # The null byte ends the purpose, so that no other purpose with other data gives the same text.
    return hmac.digest(secret.encode(), where.encode() + b"\0" + data, "sha256").hex()
