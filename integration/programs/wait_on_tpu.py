"""Make steps on a TPU whose library gives no help, while replica 1 does what the argument says.

``sleep`` and ``return`` instead of its last step; before it, ``compute`` for long in one program, and
``compile``: a long call of C that uses the processor.
"""

import hashlib
import sys
import time

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from polyxla_bridge.engine import stall_watchdog

LONG_S = 10.0


def step() -> float:
    return float(xm.all_reduce("sum", torch.ones(2, device=torch_xla.device()))[0])


def compute(products: int) -> float:
    since = time.monotonic()
    matrix = torch.eye(1000, device=torch_xla.device())
    for _ in range(products):
        matrix = matrix @ matrix
    matrix.sum().item()
    return time.monotonic() - since


def compile_something(rounds: int) -> float:
    since = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds << 16)
    return time.monotonic() - since


WORK = {"compute": compute, "compile": compile_something}


def train(_: int, how: str) -> None:
    # A played TPU's library knows which programs wait for others; a real one does not tell.
    stall_watchdog.on_stall(lambda _: None)
    step()
    if xr.global_ordinal() == 1 and how == "sleep":
        time.sleep(1000)
    if xr.global_ordinal() == 1 and how == "return":
        return
    if xr.global_ordinal() == 1 and how in WORK:
        size = 8
        while WORK[how](size) < LONG_S:
            size *= 2
    step()
    print("done\n", end="", flush=True)


if __name__ == "__main__":
    torch_xla.launch(train, args=(sys.argv[1],))
