"""The documentation's pages and their blocks, for the tests of both."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def page(name: str) -> str:
    """Return the text of a page."""
    return (ROOT / "docs" / name).read_text()


def fenced(language: str, text: str) -> list[str]:
    """Return the code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def on_one_line(text: str) -> str:
    """Return a text without its line breaks."""
    return " ".join(text.split())
