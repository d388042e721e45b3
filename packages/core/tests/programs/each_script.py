"""One replica of `polyxla run --each`: print what it sees and reads, launch, and end as the argument says."""

import json
import os
import signal
import sys
import time

from polyxla import Replica, launch

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
rank, way = int(os.environ["RANK"]), sys.argv[1]


def describe(replica: Replica, text: str) -> list[object]:
    return [text, replica.ordinal, replica.world_size, os.getpid() == pid]


pid = os.getpid()
seen = [os.environ[name] for name in NAMES]
document = [__name__, sys.argv, seen, launch(describe, ("joined",)), sys.stdin.read()]
# One string: several processes write to one pipe.
print(json.dumps(document) + "\n", end="", flush=True)
if way == "exit-0":
    sys.exit(0)
if way == "other-number":
    launch(describe, ("never",), devices=1)
if rank == 0 and way != "return":
    # Ended with the replica that fails.
    time.sleep(60)
if way == "raise":
    raise ValueError("the reason")
if way == "exit-3":
    sys.exit(3)
if way == "exit-text":
    sys.exit("the text")
if way == "killed":
    os.kill(pid, signal.SIGKILL)
