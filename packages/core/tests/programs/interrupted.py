"""A launch that reports how far it is; MOMENT is the file at which the test interrupts it."""

import atexit
import os
import sys
import time
from pathlib import Path

from polyxla.plugin import Job, Setting

FOLDER = Path(os.environ["FOLDER"])

SLOW = """
import os, time
from pathlib import Path

from polyxla.plugin import Job, Setting
if os.environ["MOMENT"] == "server-imports":
    Path(os.environ["FOLDER"], "server-imports").touch()
    time.sleep(60)
"""


def reach(moment: str, place: int) -> None:
    (FOLDER / f"{place}-{moment}").touch()
    if all((FOLDER / f"{other}-{moment}").exists() for other in range(2)):
        (FOLDER / moment).touch()


def stay(place: int) -> None:
    reach("replicas-exit", place)
    time.sleep(60)


def run(job: Job, place: int) -> None:
    if os.environ["MOMENT"] == "replicas-exit":
        atexit.register(stay, place)
        return
    reach("replicas-run", place)
    try:
        time.sleep(60)
    finally:
        (FOLDER / f"{place}-has-ended").touch()


if __name__ == "__main__":
    if os.environ["MOMENT"] == "program-imports":
        (FOLDER / "program-imports").touch()
        time.sleep(60)
    from polyxla.launcher import failures, processes

    if os.environ["MOMENT"] != "replicas-exit":
        # Nothing waits for processes that could end at once: the test would not wait so long.
        failures.INTERRUPT_GRACE_S = processes.STOP_GRACE_S = 600.0  # type: ignore[attr-defined]

    (FOLDER / "slow_to_import.py").write_text(SLOW)
    sys.path.insert(0, str(FOLDER))
    environs = [dict(os.environ)] * 2
    job = Job(print, (), "none", (0, 1), dict(os.environ), Setting(None, "default"), main=run)
    processes.run_processes(job, range(2), environs, method="forkserver", preload=["slow_to_import"])
