"""A file of comma-separated values, which a spreadsheet or pandas reads."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

METRICS_FILE = "metrics.csv"
COLUMNS = ("step", "name", "value")


class CsvLogger:
    """Writes a row for each value, at once; a resumed training appends to the file.

    Values that come later need no columns, so that rows that are written stay as they are.

    Args:
        log_dir: directory of the file `METRICS_FILE`; made if it is missing.
    """

    def __init__(self, log_dir: str) -> None:
        path = Path(log_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", newline="", buffering=1)
        self._writer = csv.writer(self._file, lineterminator="\n")
        if self._file.tell() == 0:
            self._writer.writerow(COLUMNS)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row for each value."""
        self._writer.writerows((step, name, value) for name, value in values.items())

    def close(self, error: BaseException | None) -> None:
        """Close the file."""
        self._file.close()
