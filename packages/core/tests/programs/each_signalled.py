"""One replica of `polyxla run --each` that a signal ends; it saves first if its rank is in the argument."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from polyxla.plugin import failures, on_interrupt
from polyxla_testing.processes import wait_for_end_of

FOLDER, RANK = Path(os.environ["FOLDER"]), os.environ["RANK"]
SAVES = RANK in sys.argv[1]
interrupted = threading.Event()


def save(number: int, _: object) -> None:
    # As a second signal usually does, it would end the program, before it has saved.
    signal.signal(number, signal.SIG_DFL)
    time.sleep(1)
    if (FOLDER / "1.pid").exists() and sys.argv[1] == "0":
        wait_for_end_of([int((FOLDER / "1.pid").read_text())])
    (FOLDER / f"{RANK}-saved").touch()
    sys.exit(0)


def fill() -> None:
    raise OSError("no space left")


if SAVES:
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGHUP, save)
try:
    with contextlib.ExitStack() as stack:
        if SAVES or sys.argv[1] == "full":
            stack.enter_context(on_interrupt(interrupted.set if SAVES else fill))
        (FOLDER / f"{RANK}.part").write_text(str(os.getpid()))
        (FOLDER / f"{RANK}.part").rename(FOLDER / f"{RANK}.pid")
        interrupted.wait(600)
        # Longer than a replica has that saves nothing.
        time.sleep(failures.INTERRUPT_GRACE_S + 1)
        (FOLDER / f"{RANK}-saved").touch()
finally:
    (FOLDER / f"{RANK}-finally").touch()
