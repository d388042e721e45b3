"""The code blocks of a page, and whether each runs.

The Python and shell blocks of a page run in order, in one process and one directory, unless the comment
before a block says why one does not: ``<!-- not run: needs a TPU -->``. A comment ``<!-- run: CODE -->`` is a
block that readers do not see: what a fragment needs before it, or a call after it. A Python block whose first
line is a comment with the name of a file becomes that file. In a console block, the lines after ``$`` run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"^<!-- run:\s(?P<hidden>.*?)-->$"
    r"|^(?P<indent> *)(?:<!-- not run: (?P<reason>[^\n]*) -->\n\s*)?"
    r"```(?P<language>python|sh|bash|console)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
FILE = re.compile(r"# ([\w.-]+\.py)\n")


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        line: its line in the page, from 1.
        language: "python", "sh", "bash" or "console".
        text: its lines, without the indentation of a list.
        reason: why it is not run; None if it is.
    """

    line: int
    language: str
    text: str
    reason: str | None = None

    @property
    def file(self) -> str | None:
        """The name of the file that the block becomes; None if it is code to run."""
        found = FILE.match(self.text)
        return found[1] if found and self.language == "python" else None

    @property
    def code(self) -> str:
        """The block as a cell of a notebook."""
        if self.file:
            return f"%%writefile {self.file}\n{self.text}"
        if self.language == "python":
            return self.text
        # Without -e, a block would fail only if its last command does.
        return f"%%bash -e\n{self.commands}"

    @property
    def commands(self) -> str:
        """The commands of a block in a shell's language."""
        if self.language != "console":
            return self.text
        found = re.findall(r"^\$ ((?:.*\\\n)*.*)", self.text, re.MULTILINE)
        return "\n".join(found)


def pages() -> list[Path]:
    """Return the pages whose blocks run: the project's README and the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path) -> Iterator[Block]:
    """Return the blocks of a page, hidden ones included, in their order."""
    page = path.read_text()
    for found in BLOCK.finditer(page):
        line = page.count("\n", 0, found.start()) + 1
        if found["hidden"] is not None:
            yield Block(line, "python", found["hidden"])
        else:
            text = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
            yield Block(line, found["language"], text, found["reason"])
