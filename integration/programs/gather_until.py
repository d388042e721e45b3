"""Gathers objects until a file appears; prints how each gathering went wrong, if one did."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import polyxla


def gather(replica: polyxla.Replica, directory: Path) -> int:
    wanted = [{"ordinal": ordinal} for ordinal in range(replica.world_size)]
    gathered = 0
    ends = False
    while not ends:
        found = replica.all_gather({"ordinal": replica.ordinal})
        assert found == wanted, found
        gathered += 1
        (directory / f"gathered-{replica.ordinal}").touch()
        ends = any(replica.all_gather((directory / "end").exists()))
        time.sleep(0.1)
    return gathered


if __name__ == "__main__":
    counts = polyxla.launch(gather, (Path(sys.argv[1]),))
    print("GATHERED", *(min(count, 2) for count in counts))
