#!/usr/bin/env python3
"""Find text in tracked files that belongs to one machine only; print it, and fail.

That is: hosts that packages were fetched from, absolute paths into a home or working directory, and the lock
file, which records both.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Spelt in parts, or this file would be its own first finding.
HOSTS = (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("download", "pytorch", "org"))
UNWANTED = {
    "package-index host": re.compile("|".join(r"\.".join(parts) for parts in HOSTS)),
    "machine path": re.compile(r"(?<![\w.-])/(?:work|root|home)/"),
}
LOCK_FILES = {"uv.lock"}


def findings() -> list[str]:
    """List ``path:line: kind: text`` of everything that should not be committed."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S607
    found = []
    for name in filter(None, listing.stdout.split("\0")):
        if Path(name).name in LOCK_FILES:
            found.append(f"{name}: lock file")
        found.extend(in_file(name))
    return found


def in_file(name: str) -> list[str]:
    """List the findings in one file. Binary and deleted files have none."""
    try:
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
        return []
    return [
        f"{name}:{number}: {what}: {line.strip()}"
        for number, line in enumerate(lines, start=1)
        for what, pattern in UNWANTED.items()
        if pattern.search(line)
    ]


if __name__ == "__main__":
    problems = findings()
    print("\n".join(problems), end="\n" if problems else "")
    sys.exit(bool(problems))
