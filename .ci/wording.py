#!/usr/bin/env python3
"""Find wordings that a native reader stumbles over; print each with a better one, and fail.

It reads the packages' sources, the documentation and the READMEs. Vale would do the same, but its wheel holds
no program: it downloads one at its first use, which a machine without a network cannot.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READ = (
    "packages/*/src/**/*.py",
    "packages/*/src/**/*.proto",
    "packages/*/README.md",
    "docs/**/*.md",
    "docs/**/*.svg",
    "*.md",
    "*.toml",
    "noxfile.py",
    "mkdocs.yml",
    ".ci/*",
)
# The changelog is never rewritten, and this file lists the wordings themselves.
NOT_READ = {"CHANGELOG.md", ".ci/wording.py"}
BETTER = {
    "in vain": "stuck, stalled, without a result",
    "the person": "the user",
    "a person": "a user",
    "a stranger": "a third party",
    "a stranger's": "third-party",
    "is none": "say what is wrong: is invalid, is not a tensor",
    "are none": "say what is wrong: are invalid, are not tensors",
    "what is no": "anything other than",
    "what are no": "anything other than",
    "nobody who": "no user who",
    "told": "reported, printed, passed",
    "hears of": "is informed of, receives",
    "hear of": "are informed of, receive",
    "roll call": "startup barrier",
    "leak police": "leak check",
    "whole number": "integer",
    "whole numbers": "integers",
    "goes on from": "resumes from",
    "is to be had": "is available",
    "are to be had": "are available",
    "for want of": "because there is no",
    "a nest": "a pytree",
    "the nest": "the pytree",
}


def findings() -> Iterator[str]:
    """Yield ``path:line: wording: better`` of every wording that has a better one."""
    for path in sorted({path for pattern in READ for path in ROOT.glob(pattern) if path.is_file()}):
        name = str(path.relative_to(ROOT))
        if name not in NOT_READ and "_pb2" not in name:
            text = path.read_text(encoding="utf-8")
            for match in WORDINGS.finditer(text):
                wording = re.sub(r"[\s#]+", " ", match[0])
                line = text.count("\n", 0, match.start()) + 1
                yield f"{name}:{line}: {wording!r}: {BETTER[wording.lower()]}"


def _pattern(wording: str) -> str:
    # Only the first letter may be a capital: `is None` is Python. A line may end between two words.
    first, rest = wording[0], wording[1:].replace(" ", r"[\s#]+")
    # "None of these" is good English.
    end = "(?! of )" if rest.endswith("none") else ""
    return f"[{first.upper()}{first}]{rest}{end}"


# "There is none" is good English. The longest come first: "whole numbers" is not "whole number".
LONGEST_FIRST = sorted(BETTER, key=len, reverse=True)
WORDINGS = re.compile(rf"(?<!\bthere )\b(?:{'|'.join(map(_pattern, LONGEST_FIRST))})\b")


if __name__ == "__main__":
    found = list(findings())
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))
