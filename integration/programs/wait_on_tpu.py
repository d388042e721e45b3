"""Make steps on a TPU whose library gives no help, while replica 1 does what the argument says.

``sleep`` and ``return`` instead of its last step; before it, ``compute`` for long in one program, and
``compile``: a long call of C that uses the processor.
"""

import hashlib
import sys
import time

import torch

import polyxla
from polyxla import Replica
from polyxla_bridge.engine import stall_watchdog

LONG_S = 10.0


def step(replica: Replica) -> float:
    return float(replica.all_reduce(torch.ones(2, device=replica.device))[0])


def compute(replica: Replica, products: int) -> float:
    since = time.monotonic()
    matrix = torch.eye(1000, device=replica.device)
    for _ in range(products):
        matrix = matrix @ matrix
    matrix.sum().item()
    return time.monotonic() - since


def compile_something(_: Replica, rounds: int) -> float:
    since = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds << 16)
    return time.monotonic() - since


WORK = {"compute": compute, "compile": compile_something}


def train(replica: Replica, how: str) -> None:
    # An emulated TPU's library knows which programs wait for others; a real one does not report it.
    stall_watchdog.on_stall(lambda *_: None)
    step(replica)
    if replica.ordinal == 1 and how == "sleep":
        time.sleep(1000)
    if replica.ordinal == 1 and how == "return":
        return
    if replica.ordinal == 1 and how in WORK:
        size = 8
        while WORK[how](replica, size) < LONG_S:
            size *= 2
    step(replica)
    print("done\n", end="", flush=True)


if __name__ == "__main__":
    polyxla.launch(train, (sys.argv[1],))
