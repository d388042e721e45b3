"""Whether all hosts of a job share a directory, checked through the directory itself."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyxla import UsageError
from polyxla_training.storage import Location, locate

if TYPE_CHECKING:
    from polyxla.plugin import Collectives

SEEN_S = 35.0
"""Longest wait of a host for another host's file to appear, in seconds: a client of NFS may take its cached
directory for valid for 30 s. Source: nfs(5), acdirmin."""
_POLL_S = 0.1
MAX_NAMES = 3
"""Number of hosts that an error names."""


@dataclass(frozen=True)
class _Offer:
    """Ordinal 0's file.

    Attributes:
        host_index: number of its host.
        host: name of its host.
        name: name of the file.
        problem: why the file could not be written; empty if it was.
    """

    host_index: int
    host: str
    name: str
    problem: str = ""


def check_shared(replica: Collectives, directory: str | os.PathLike[str], where: str) -> None:
    """Check that all hosts share a directory. A collective; does nothing if there is one host.

    Ordinal 0 writes a file into the directory, which one replica of each other host looks for. The file is
    removed in any case. Blocks for at most `SEEN_S` longer than the slowest replica.

    Args:
        replica: this replica.
        directory: the directory, which is made if there is none, or its URL in an object store.
        where: the setting that names it, for errors.

    Raises:
        UsageError: in every replica, if a host does not see the file, or ordinal 0 cannot write it.
    """
    if replica.world.host_count == 1:
        return
    place = locate(directory)
    with _offered(replica, place) as own:
        offer: _Offer = replica.broadcast(own)
        # Raised in all replicas, because each of them has received the offer.
        if offer.problem:
            host = _label(offer.host_index, offer.host)
            raise UsageError(
                f"{str(directory)!r} cannot be written to on {host}: {offer.problem}",
                where=where,
                fix="Name a directory that the first host may write to and all hosts share, or a URL such as "
                "gs://bucket/run.",
            )
        looks = replica.world.local_ordinal == 0 and replica.world.host_index != offer.host_index
        # One replica of each other host looks; more would only ask the file system the same question.
        misses = looks and not appears(place / offer.name)
        found = replica.all_gather((replica.world.host_index, socket.gethostname()) if misses else None)
    if missing := sorted(host for host in found if host is not None):
        raise _not_shared(directory, where, offer, [_label(*host) for host in missing])


@contextmanager
def _offered(replica: Collectives, place: Location) -> Iterator[_Offer]:
    """Write ordinal 0's file, and remove it after the block; the other replicas write none."""
    # A random name: two jobs that start at the same time must not take each other's file for their own.
    offer = _Offer(replica.world.host_index, socket.gethostname(), f".polyxla-shared-{secrets.token_hex(8)}")
    if not replica.is_first:
        yield offer
        return
    file = place / offer.name
    try:
        if isinstance(place, Path):
            place.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    except OSError as error:
        offer = _Offer(offer.host_index, offer.host, offer.name, error.strerror or str(error))
    try:
        yield offer
    finally:
        # Without the file there is nothing to remove, and a store that fails now has just been written to.
        with suppress(OSError):
            file.unlink(missing_ok=True)


def appears(place: Location) -> bool:
    """Return whether a file or directory that another host has made is there within `SEEN_S`."""
    # Monotonic, because the system clock may be adjusted while this waits.
    deadline = time.monotonic() + SEEN_S
    while True:
        try:
            place.stat()
        except OSError:
            if time.monotonic() > deadline:
                return False
            # Polled: network file systems report no changes that other hosts make.
            time.sleep(_POLL_S)
        else:
            return True


def _label(host_index: int, host: str) -> str:
    return f"host {host_index} ({host})"


def _not_shared(
    directory: str | os.PathLike[str], where: str, offer: _Offer, missing: list[str]
) -> UsageError:
    more = f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
    return UsageError(
        f"{', '.join(missing[:MAX_NAMES])}{more} did not see within {SEEN_S:g} s the file that "
        f"{_label(offer.host_index, offer.host)} has written to {str(directory)!r}: "
        "the hosts do not share the directory",
        where=where,
        fix="Write checkpoints to a file system that all hosts share, or to a URL such as gs://bucket/run, "
        "and give all hosts the same path.",
    )
