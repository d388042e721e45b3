"""``python -m polyxla_tools.fits.compile_process``: compile programs with libtpu, in a process of its own.

Arguments: libtpu's path, the topology and its options in JSON. The first line of the output is the number of
devices. Then a line of input with the paths of a program and its options is answered with a line of JSON: the
seconds, and either the cost or the error. All other output of libtpu goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from polyxla_bridge.errors import PjrtError
from polyxla_tools.fits.plugin_api import Compiler


def main() -> None:
    """Serve until the end of the input."""
    library, topology, options = sys.argv[1:]
    # libtpu prints, too.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            compiler = Compiler(Path(library), topology, json.loads(options))
        except PjrtError as error:
            answers.write(json.dumps({"error": error.message, "code": error.code}) + "\n")
            return
        answers.write(json.dumps({"devices": compiler.device_count}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(_compile(compiler, *map(Path, json.loads(line)))) + "\n")


def _compile(compiler: Compiler, hlo: Path, options: Path) -> dict[str, Any]:
    started = time.perf_counter()
    answer: dict[str, Any]
    try:
        answer = {"cost": dataclasses.asdict(compiler.compile(hlo.read_bytes(), options.read_bytes()))}
    except PjrtError as error:
        answer = {"error": error.message, "code": error.code}
    return {**answer, "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    main()
