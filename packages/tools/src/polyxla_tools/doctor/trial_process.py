"""The process of the trial: launches the replicas, and writes what they measured, or the error, to a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from polyxla import PolyxlaError, launch
from polyxla.plugin import end_with_parent
from polyxla_tools.doctor.all_reduce import all_reduce


def main(runtime: str, devices: str, started: str, answer: str) -> None:
    """Run the trial.

    Args:
        runtime: the runtime's name.
        devices: the indices of the devices, as JSON.
        started: when the trial started, on the machine's monotonic clock.
        answer: the file to write.
    """
    end_with_parent()
    try:
        results = launch(all_reduce, [float(started)], runtime=runtime, devices=json.loads(devices))
    except Exception as error:
        text = str(error) if isinstance(error, PolyxlaError) else f"{type(error).__name__}: {error}"
        Path(answer).write_text(json.dumps({"error": text}))
        raise
    Path(answer).write_text(json.dumps({"replicas": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
