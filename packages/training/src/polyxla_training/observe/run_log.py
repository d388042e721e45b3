"""A run as a file: one JSON document a line, readable also when the run was killed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyxla.errors import UsageError

if TYPE_CHECKING:
    from polyxla.replica.replica import Replica

RUN_LOG = "run.jsonl"
"""The file's name in a run's folder."""


class RunLog:
    """Writes a run's events. Every line is flushed, so what was written survives the process.

    A folder that has a run already keeps it: the new one follows.

    Args:
        folder: the run's; made where it is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / RUN_LOG
        path.parent.mkdir(parents=True, exist_ok=True)
        is_torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if is_torn:
            # The run before was killed while it wrote.
            self._file.write("\n")

    def start(self, replica: Replica, **fields: Any) -> None:
        """Append the event that a run begins with: where it runs, and `fields`."""
        self.write(
            "start",
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            polyxla=version("polyxla-core"),
            runtime=replica.runtime,
            device=replica.kind,
            world_size=replica.world_size,
            **fields,
        )

    def write(self, event: str, **fields: Any) -> None:
        """Append an event; numbers that are not finite, which JSON does not have, become null."""
        document = {"event": event, **fields}
        self._file.write(json.dumps(_finite(document), allow_nan=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; nothing may be written afterwards."""
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_run(folder: str | Path) -> list[dict[str, Any]]:
    """Return the events of the last run in `folder`; a line that was cut off by the run's end is left out.

    Raises:
        UsageError: there is no run in it.
    """
    path = Path(folder) / RUN_LOG if Path(folder).is_dir() else Path(folder)
    if not path.exists():
        raise UsageError(
            f"there is no {RUN_LOG}",
            where=str(folder),
            fix="Give the log_dir of a training, or the file itself.",
        )
    events = list(_events(path.read_text(encoding="utf-8", errors="replace")))
    starts = [index for index, event in enumerate(events) if event.get("event") == "start"]
    if not starts:
        raise UsageError("the file has no run in it", where=str(path), fix="Train with log_dir set.")
    return events[starts[-1] :]


def _events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def newest_run(folder: str | Path) -> Path:
    """Return the folder below `folder` whose run was written to last.

    Raises:
        UsageError: there is none.
    """
    logs = sorted(Path(folder).glob(f"**/{RUN_LOG}"), key=lambda log: log.stat().st_mtime)
    if not logs:
        raise UsageError(
            f"there is no run below {folder}", where="polyxla report", fix="Name the log_dir of a training."
        )
    return logs[-1].parent
