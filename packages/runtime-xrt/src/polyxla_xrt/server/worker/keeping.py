"""What jobs keep on a worker for the next job of the same owner."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol.channels import CHUNK_BYTES

MAX_NAMES = 64
"""Maximum number of names of one owner."""
_SWEEP_S = 0.5
"""Interval at which what has been kept long enough is freed, in seconds."""


class TooMuchError(Exception):
    """It exceeds a limit, which the text names."""


@dataclass(frozen=True)
class KeptFile:
    """What is kept under a name, in a file of memory.

    Attributes:
        owner: the secret of the jobs that may read it.
        name: the name.
        holder: the job that kept it, a `pb.Holder`.
    """

    owner: str
    name: str
    holder: bytes = field(compare=False)


Kept = dict[KeptFile, int]
"""What is kept, with the descriptors of the files."""
Order = Callable[[KeptFile, int | None], None]
"""Gives a file to the supervisor, in place of the one that it has under this name; None frees that."""


@dataclass
class _Owner:
    """An owner's files with their descriptors, by name; when they are freed, unless one of its jobs runs."""

    files: dict[str, tuple[KeptFile, int]] = field(default_factory=dict)
    freed: float | None = None
    jobs: int = 0


class Keeper:
    """Keeps bytes by owner and name, for some time after the owner's last job. Thread-safe.

    The bytes are in files of memory. The supervisor of this process has them, too, so that they outlive this
    process, which ends with programs that cannot be stopped.

    Args:
        keep_s: how long to keep them, in seconds.
        limit_bytes: limit of all of them together.
        before: what the process before this one kept.
        order: informs the supervisor.
    """

    def __init__(self, keep_s: float, limit_bytes: int, before: Kept, order: Order) -> None:
        self._keep_s, self._limit_bytes, self._order = keep_s, limit_bytes, order
        self._owners: dict[str, _Owner] = {}
        # The files that are being received, and their sizes.
        self._coming: list[tuple[KeptFile, int]] = []
        self._lock = threading.Lock()
        for file, number in before.items():
            self._owners.setdefault(file.owner, _Owner()).files[file.name] = (file, number)
        for owner in self._owners.values():
            owner.freed = time.monotonic() + keep_s
        threading.Thread(target=self._sweep, name="polyxla-kept", daemon=True).start()

    def begin(self, owner: str) -> None:
        """Record a job of an owner, which keeps what it finds."""
        with self._lock:
            found = self._owners.setdefault(owner, _Owner())
            found.jobs, found.freed = found.jobs + 1, None

    def end(self, owner: str) -> None:
        """Record the end of such a job."""
        with self._lock:
            found = self._owners[owner]
            found.jobs -= 1
            if not found.jobs:
                found.freed = time.monotonic() + self._keep_s

    def _sweep(self) -> None:
        """Free what has been kept long enough, for as long as this process lives."""
        while True:
            time.sleep(_SWEEP_S)
            with self._lock:
                for owner, found in list(self._owners.items()):
                    if found.freed is None or found.freed > time.monotonic():
                        continue
                    del self._owners[owner]
                    for file, number in found.files.values():
                        os.close(number)
                        self._order(file, None)

    def put(self, file: KeptFile, size: int, chunks: Iterator[bytes]) -> None:
        """Keep bytes under a name, in place of what was there; all of them or, on an error, none.

        Args:
            file: where to keep them.
            size: their number.
            chunks: the bytes.

        Raises:
            TooMuchError: there is no room, or there are more or fewer bytes.
        """
        coming = (file, size)
        with self._lock:
            self._check_room(file, size)
            self._coming.append(coming)
        try:
            number = _receive(size, chunks)
            try:
                with self._lock:
                    # The supervisor must get two files of one name in the order in which they are kept here.
                    self._order(file, number)
                    before = self._owners[file.owner].files.get(file.name)
                    self._owners[file.owner].files[file.name] = (file, number)
            except BaseException:
                os.close(number)
                raise
        finally:
            with self._lock:
                self._coming.remove(coming)
        if before:
            os.close(before[1])

    def _check_room(self, file: KeptFile, size: int) -> None:
        coming = {other.name for other, _ in self._coming if other.owner == file.owner}
        if len({*self._owners[file.owner].files, *coming, file.name}) > MAX_NAMES:
            raise TooMuchError(f"a job may keep {MAX_NAMES} names")
        # What it replaces is freed only after it has come.
        held = sum(_size(number) for owner in self._owners.values() for _, number in owner.files.values())
        held += sum(size for _, size in self._coming)
        if held + size > self._limit_bytes:
            limit, now, more = (number / 2**20 for number in (self._limit_bytes, held, size))
            raise TooMuchError(
                f"jobs may keep {limit:,.0f} MiB on this worker, keep {now:,.0f} MiB, and this one requests "
                f"{more:,.1f} MiB more"
            )

    def get(self, owner: str, name: str) -> Iterator[bytes] | None:
        """Return the bytes that are kept under a name, in chunks; None if there are none."""
        with self._lock:
            if (found := self._owners.get(owner)) is None or name not in found.files:
                return None
            # The copy stays readable if the original is replaced.
            number = os.dup(found.files[name][1])
        return _read(number)

    def describe(self) -> list[pb.Kept]:
        """Return the messages that describe what is kept."""
        now = time.monotonic()
        with self._lock:
            return [
                pb.Kept(
                    holder=pb.Holder.FromString(file.holder),
                    name=file.name,
                    bytes=_size(number),
                    left_s=None if owner.freed is None else max(0.0, owner.freed - now),
                )
                for owner in self._owners.values()
                for file, number in owner.files.values()
            ]


def _receive(size: int, chunks: Iterator[bytes]) -> int:
    """Write bytes to a file of memory; return its descriptor."""
    number = os.memfd_create("polyxla-kept")
    try:
        came = 0
        for chunk in chunks:
            came += len(chunk)
            if came > size:
                break
            os.write(number, chunk)
    except BaseException:
        os.close(number)
        raise
    if came != size:
        os.close(number)
        raise TooMuchError(f"there are not {size} bytes, as announced")
    return number


def _size(number: int) -> int:
    return os.fstat(number).st_size


def _read(number: int) -> Iterator[bytes]:
    with os.fdopen(number, "rb") as file:
        at = 0
        # The position is shared with the original, and with other readers.
        while chunk := os.pread(file.fileno(), CHUNK_BYTES, at):
            at += len(chunk)
            yield chunk
