#!/usr/bin/env python3
"""Add up the JUnit files in a directory, and print one line: ``N passed, N failed, N skipped``.

Fails if a test failed or no test passed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree as ET


def tally(directory: Path) -> tuple[int, int, int]:
    """Return how many tests passed, failed (or could not run) and were skipped."""
    total = failed = skipped = 0
    for path in sorted(directory.glob("*.xml")):
        # Our own pytest wrote it.
        for suite in ET.parse(path).iter("testsuite"):  # noqa: S314
            total += int(suite.get("tests", "0"))
            failed += int(suite.get("failures", "0")) + int(suite.get("errors", "0"))
            skipped += int(suite.get("skipped", "0"))
    return total - failed - skipped, failed, skipped


if __name__ == "__main__":
    passed, failed, skipped = tally(Path(sys.argv[1]))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(bool(failed) or not passed)
