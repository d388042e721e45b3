"""Writes the ids of this process and of two it starts, then sleeps; what follows is done on one host only.

The arguments are the host's number and ``raise``, ``exit N`` or ``kill``; ``stubborn`` ignores SIGTERM.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

directory, number = pathlib.Path(os.environ["POD_TEST"]), os.environ["NUMBER"]
words = sys.argv[1:]
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", SLEEP])
# As a daemon does it: another session, and a parent that has ended.
daemon = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}], stdout=2, start_new_session=True).pid)"
orphan = (
    int(subprocess.run([sys.executable, "-c", daemon], check=True, stdout=subprocess.PIPE).stdout.split()[0])
    if "daemon" in words
    else child.pid
)
for pid in {os.getpid(), child.pid, orphan}:
    new = directory / f"{number}-{pid}.new"
    new.write_text(str(pid))
    new.rename(directory / f"{number}-{pid}.pid")
print("started", flush=True)
if words[:1] == [number]:
    # The others have started as well.
    while len({path.name.partition("-")[0] for path in directory.glob("*.pid")}) < int(
        os.environ.get("HOSTS", "2")
    ):
        time.sleep(0.02)
    if words[1] == "raise":
        raise RuntimeError(f"boom on {number}")
    if words[1] == "exit":
        sys.exit(int(words[2]))
    if words[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
