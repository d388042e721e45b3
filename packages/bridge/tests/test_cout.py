"""The filter for gloo's greetings on standard output; all other output must arrive unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 60
PROGRAM = Path(__file__).with_name("programs") / "cout.py"


def printed(code: str) -> str:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), code],
        # PYTHONUNBUFFERED also makes C's standard output unbuffered.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("say('[Gloo] Rank ', 3, ' is connected to ', 1, ' peer ranks. '); end(); say('on\\n')", "on\n"),
        ("say('[Gloo] Rank 3 is\\n', '[Gloo] Rank 2 is\\nmore\\n')", "more\n"),
        ("say('[Gloo] ', 'Rank 3\\n')", "[Gloo] Rank 3\n"),
        ("say('says: ', '[Gloo] Rank ', 3); end()", "says: [Gloo] Rank 3\n"),
        (
            "say('a', 1, '\\nb\\n[Gloo] Rank 1\\n'); end(); say('', 'no end')",
            "a1\nb\n[Gloo] Rank 1\n\nno end",
        ),
    ],
)
def test_only_lines_that_gloo_begins_are_dropped(code: str, expected: str) -> None:
    assert printed(code) == expected


def test_lines_of_threads_are_filtered_separately() -> None:
    assert printed("interleaved_threads()") == "first [Gloo] Rank second\nthird\n"


def test_output_arrives_when_it_is_flushed() -> None:
    assert printed("import os; say('now'); flush(cout); say('never'); os._exit(0)") == "now"


def test_installing_the_filter_twice_is_harmless() -> None:
    assert printed("native.LOCKED.polyxla_drop_greetings(); say('[Gloo] Rank '); end(); say('x')") == "x"
