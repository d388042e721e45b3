"""Writes the ids of this process and of those it starts, then sleeps; what follows is done on one host only.

The arguments are the host's number and ``raise``, ``exit N`` or ``kill``, after which the others are awaited;
``stubborn`` ignores SIGTERM, ``last`` prints at it, and ``daemon`` starts a process that leaves the group and
its parent.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

SLEEP = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(300)
"""
DAEMON = """
import subprocess, sys
command = [sys.executable, "-c", sys.argv[1]]
process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
process.stdout.readline()
print(process.pid)
"""
directory, number = pathlib.Path(os.environ["POD_TEST"]), os.environ["NUMBER"]
words = sys.argv[1:]
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "last" in words:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("last words", flush=True)))
child = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE)
assert child.stdout
child.stdout.readline()
pids = [os.getpid(), child.pid]
if "daemon" in words:
    pids.append(int(subprocess.check_output([sys.executable, "-c", DAEMON, SLEEP])))
print("started", flush=True)
for pid in pids:
    new = directory / f"{number}-{pid}.new"
    new.write_text(str(pid))
    new.rename(directory / f"{number}-{pid}.pid")


def hosts() -> int:
    return len({path.name.partition("-")[0] for path in directory.glob("*.pid")})


if words[:1] == [number]:
    while hosts() < 2:
        time.sleep(0.02)
    if words[1] == "raise":
        raise RuntimeError(f"boom on {number}")
    if words[1] == "exit":
        sys.exit(int(words[2]))
    if words[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
