"""Runs a program whose process gives up a silent peer sooner: ``PING_S SILENCE_S PROGRAM ARGUMENTS...``.

The program is a file, or the name of a module.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from polyxla_xrt.protocol import worker
from polyxla_xrt.protocol.channels import peer_options


def main() -> None:
    ping_s, silence_s = map(int, sys.argv[1:3])
    # This comes before the modules that read them.
    worker.PING_S, worker.SILENCE_S = ping_s, silence_s
    worker.OPTIONS = peer_options(ping_s=ping_s, silence_s=silence_s)
    sys.argv = sys.argv[3:]
    program = sys.argv[0]
    if program.endswith(".py"):
        # A script finds the modules beside it.
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__")


if __name__ == "__main__":
    main()
