"""The log of a run: a file of one JSON document per line, which a killed run leaves readable."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyxla.errors import UsageError
from polyxla_training.observe.provenance import provenance
from polyxla_training.storage.location import check_location, locate

if TYPE_CHECKING:
    from polyxla.replica.replica import Replica

RUN_LOG = "run.jsonl"
"""Name of the file in a run's directory."""


class RunLog:
    """Writes a run's events. Every line is flushed, so that it survives the process.

    If the directory has a run already, the new one is appended.

    Args:
        directory: the run's directory; made if it is missing.
    """

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory) / RUN_LOG
        path.parent.mkdir(parents=True, exist_ok=True)
        is_torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if is_torn:
            # The run before was killed while it wrote a line.
            self._file.write("\n")

    def start(self, replica: Replica, **fields: Any) -> None:
        """Append the start event: runtime, device, number of replicas, `fields`, and the provenance."""
        self.write(
            "start",
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            polyxla=version("polyxla-core"),
            runtime=replica.runtime,
            device=replica.kind,
            world_size=replica.world_size,
            **fields,
            **provenance(),
        )

    def write(self, event: str, **fields: Any) -> None:
        """Append an event; numbers that are not finite become null, because JSON has none."""
        document = {"event": event, **fields}
        self._file.write(json.dumps(_finite(document), allow_nan=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_run(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of the last run in a log; a line that was cut off is left out.

    Args:
        run: a run's directory, or the log itself; a path or a URL.

    Raises:
        UsageError: there is no log, no run in it, or it cannot be read.
    """
    check_location(run, "the run")
    place = locate(run)
    is_directory = place.is_dir() if isinstance(place, Path) else not place.name.endswith(".jsonl")
    path = place / RUN_LOG if is_directory else place
    fix = "Pass the log_dir of a training, or the file itself."
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError as error:
        raise UsageError(f"there is no {RUN_LOG}", where=str(run), fix=fix) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}", where=str(run), fix=fix) from error
    events = list(_events(text))
    starts = [index for index, event in enumerate(events) if event.get("event") == "start"]
    if not starts:
        raise UsageError("the file contains no run", where=str(path), fix="Train with log_dir set.")
    return events[starts[-1] :]


def _events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def newest_run(directory: str | Path) -> Path:
    """Return the run's directory below `directory` that was written to last.

    Raises:
        UsageError: there is no run.
    """
    logs = sorted(Path(directory).glob(f"**/{RUN_LOG}"), key=lambda log: log.stat().st_mtime)
    if not logs:
        raise UsageError(
            f"there is no run below {directory}",
            where="polyxla report",
            fix="Pass the log_dir of a training.",
        )
    return logs[-1].parent
