"""Texts of others on the user's terminal."""

from __future__ import annotations

import pytest

from polyxla.console import printable, say

HOSTILE = "train\x1b]0;title\x07\x1b[2J\x9b31m\u202egnp.py\r"
SPELT = r"train\x1b]0;title\x07\x1b[2J\x9b31m\u202egnp.py\r"


def test_what_a_terminal_obeys_is_spelt_out(capfd: pytest.CaptureFixture[str]) -> None:
    say(f"the worker's cores are held by {HOSTILE}\n  line 2\tüé漢 'x' \\")
    assert capfd.readouterr().err == (
        f"polyxla: the worker's cores are held by {SPELT}\n  line 2\tüé漢 'x' \\\n"
    )


def test_other_texts_stay_as_they_are() -> None:
    for text in ("", "plain", "naïve 日本語 🙂", "two\nlines\tand a tab", r"C:\new"):
        assert printable(text) == text
