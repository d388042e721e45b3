"""The worker's log: one line per event, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_CONTROLS = {number: f"\\x{number:02x}" for number in (*range(32), 127)}


def start(*, as_json: bool) -> None:
    """Send polyxla's log to standard error.

    Args:
        as_json: whether to write JSON lines instead of text.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if as_json else _TextFormatter())
    log = logging.getLogger("polyxla")
    # A second call must not print each line twice.
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    # The root logger's handlers would print every line again.
    log.propagate = False


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    return record.getMessage(), dict(getattr(record, "event", {}))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text, event = _parts(record)
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "event": text, **event}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text, event = _parts(record)
        when = datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(" ", "seconds")
        more = "".join(f" {name}={value}" for name, value in event.items())
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        # Control characters are escaped: a name that a client chose must not be able to fake a line of this
        # log.
        return f"{when} polyxla worker: {(text + more).translate(_CONTROLS)}{trace}"
