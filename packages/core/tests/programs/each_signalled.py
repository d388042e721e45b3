"""One replica of `polyxla run --each` that a signal ends; it saves first if its rank is in the argument."""

import os
import signal
import sys
import time
from pathlib import Path

from polyxla_testing.processes import wait_for_end_of

FOLDER, RANK = Path(os.environ["FOLDER"]), os.environ["RANK"]


def save(number: int, _: object) -> None:
    # As a second signal usually does, it would end the program, before it has saved.
    signal.signal(number, signal.SIG_DFL)
    time.sleep(1)
    if sys.argv[1] == "0":
        wait_for_end_of([int((FOLDER / "1.pid").read_text())])
    (FOLDER / f"{RANK}-saved").touch()
    sys.exit(0)


if RANK in sys.argv[1]:
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGHUP, save)
try:
    (FOLDER / f"{RANK}.part").write_text(str(os.getpid()))
    (FOLDER / f"{RANK}.part").rename(FOLDER / f"{RANK}.pid")
    time.sleep(600)
finally:
    (FOLDER / f"{RANK}-finally").touch()
