"""Forks programs that end in three ways while their devices still work, and prints their exit codes."""

import os
import signal
import sys
import time

import torch
import torch_xla

LIMIT_S = 30


def program(number: int) -> None:
    for _ in range(3):
        torch.ones(200_000).to(torch_xla.device()) * 2
        torch_xla.sync()
    if number % 3 == 1:
        raise KeyError("mine")
    sys.exit(number % 3)


codes: list[int | str] = []
for number in range(6):
    child = os.fork()
    if child == 0:
        program(number)
    end = time.monotonic() + LIMIT_S
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
    codes.append(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs")
print(codes)
