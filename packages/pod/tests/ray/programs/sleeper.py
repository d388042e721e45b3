"""Write process ids, wait for the other host, then sleep the first time; or fail on the host given."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from polyxla_testing.processes import wait_for_files

if __name__ == "__main__":
    directory, number = Path(os.environ["RAY_TEST"]), os.environ["NUMBER"]
    # Out of the command's process group.
    daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
    for pid in (os.getpid(), daemon.pid):
        Path(directory, f"{number}-{pid}.tmp").write_text(str(pid))
        Path(directory, f"{number}-{pid}.tmp").rename(directory / f"{number}-{pid}.pid")
    Path(directory, f"{number}.started").touch()
    wait_for_files(directory / "0.started", directory / "1.started")
    if sys.argv[1:] == [number]:
        raise RuntimeError(f"boom on {number}")
    if directory.joinpath(f"{number}.again").exists():
        sys.exit()
    directory.joinpath(f"{number}.again").touch()
    time.sleep(600)
