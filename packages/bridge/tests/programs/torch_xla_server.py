"""Runs programs in forked processes that have torch_xla imported: the import takes longer than most tests.

Each line of standard input is a request with programs that make one job. The answer is a line with their exit
codes.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
from typing import Any


def ended(children: list[int], timeout_s: float) -> list[int]:
    """Wait for the children, kill those that do not end, and return the exit codes."""
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout_s
    while len(codes) < len(children):
        for child in children:
            if child not in codes and (status := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(status[1])
            elif child not in codes and time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[child] for child in children]


def serve() -> Any:
    """Answer requests; return in each child, with its program."""
    for line in sys.stdin:
        request, children = json.loads(line), []
        for program in request["programs"]:
            children.append(os.fork())
            if children[-1] == 0:
                return program
        print(json.dumps(ended(children, request["timeout_s"])), flush=True)
    sys.exit()


importlib.import_module("torch_xla_helpers")
# At its end, a program would otherwise take all imported modules apart, and copy their memory for it.
gc.collect()
gc.freeze()
program = serve()
for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT), (2, os.O_WRONLY | os.O_CREAT)):
    os.dup2(os.open(program["files"][number], flags), number)
os.environ.update(program["environ"])
sys.argv = program["command"]
# At module level and not in a function: the program's variables must live until Python ends, as in a script.
exec(compile(program["code"], program["command"][0], "exec", dont_inherit=True))
