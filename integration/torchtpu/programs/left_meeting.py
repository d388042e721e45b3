"""Launches while a file is here in which an earlier job, whose parent had the same process id, has met."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import polyxla
from polyxla import Replica

KEY = b"/local_down:world_topo:0:4"


def gather(replica: Replica) -> tuple[int, list[int]]:
    """Return the parent's process id, and the ordinals of all."""
    return os.getppid(), replica.all_gather(replica.ordinal)


def left(parent: int) -> Path:
    """Write what a job on other chips leaves: for each rank its device, and where that is.

    Source: torch's FileStore, which has the length before each key and value, and a file of torch_tpu 0.2.0.
    """
    places = ["0,0,0", "1,0,0", "0,1,0", "1,1,0"]
    devices = [f"{rank},{rank},{place},0,-1,TPU v4" for rank, place in enumerate(places)]
    value = b"OK\n" + "".join(f"{len(device)}:{device}" for device in devices).encode()
    path = Path(f"/dev/shm/torch_tpu_pg_store_{parent}")  # noqa: S108
    path.write_bytes(b"".join(struct.pack("<Q", len(part)) + part for part in (KEY, value)))
    return path


if __name__ == "__main__":
    parents = {parent for parent, _ in polyxla.launch(gather)}
    paths = [left(parent) for parent in parents]
    try:
        again = polyxla.launch(gather)
        print(len(parents), {parent for parent, _ in again} == parents, [every for _, every in again])
    finally:
        for path in paths:
            path.unlink()
