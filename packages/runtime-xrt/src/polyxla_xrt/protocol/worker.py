"""What a worker and its clients share: protocol version, limits and options."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from polyxla.plugin import printable
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol.channels import peer_options

SERVICE = "polyxla.xrt.worker.Worker"
"""The gRPC name of the service."""
PROTOCOL = 6
"""Version of the messages. Increment it for any change that an older peer would misread."""
KEY_BYTES = 16
"""Bytes of a job's key, which is written in hexadecimal digits."""
OWNER_BYTES = 32
"""Bytes of the secret of a job's owner, in hexadecimal digits."""
MAX_PROGRAM_BYTES = (1 << 31) - 1
"""Largest program: the limit of a protobuf message."""
PING_S = 5
"""Seconds between pings. The answer to one comes within `SILENCE_S - PING_S` seconds, or the peer is lost."""
SILENCE_S = 20
"""Seconds of silence after which a peer is lost. A network outage of 5 s passes: TCP retransmits after 6.2 s
at the latest. A process that dies is noticed at once, by its closed socket."""

OPTIONS = peer_options(ping_s=PING_S, silence_s=SILENCE_S)
"""gRPC options of both sides."""


def format_holder(holder: pb.Holder) -> str:
    """Format the owner of a job for a message on one line; its client may have sent any text."""
    # Another user's terminal prints this text, so it must not contain control characters.
    text = f"{holder.user}@{holder.host} (pid {holder.pid}, {holder.command})"
    return printable(text).replace("\n", "\\n")


def format_jobs(jobs: Iterable[pb.Job]) -> str:
    """Format the jobs that hold a worker's cores for a message: who they are, and since when."""
    return ", and by ".join(
        f"{format_holder(job.holder)} since "
        f"{time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(job.since))}"
        for job in jobs
    )


def array_bytes(width: int, dims: tuple[int, ...]) -> int:
    """Return the size of an array in bytes.

    Args:
        width: bytes per element.
        dims: the array's dimensions.
    """
    return width * math.prod(dims)
