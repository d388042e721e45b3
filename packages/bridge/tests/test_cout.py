"""Gloo's greetings on standard output are dropped; what others write there arrives as they wrote it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

TIMEOUT_S = 60
HEAD = """
import ctypes, os
from concurrent.futures import ThreadPoolExecutor
from polyxla_bridge import native

library = ctypes.CDLL("libstdc++.so.6")
cout = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cout")))
text = library["_ZStlsISt11char_traitsIcEERSt13basic_ostreamIcT_ES5_PKc"]
number, put, flush = library["_ZNSolsEi"], library["_ZNSo3putEc"], library["_ZNSo5flushEv"]

def say(*pieces):
    for piece in pieces:
        text(cout, piece.encode()) if isinstance(piece, str) else number(cout, piece)

def end():
    put(cout, ctypes.c_char(b"\\n"))
    flush(cout)

other = ThreadPoolExecutor(1)
def say_there(*pieces):
    other.submit(say, *pieces).result()

native.LOCKED.polyxla_drop_greetings()
"""


def printed(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)],
        # With which Python makes C's standard output unbuffered too.
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
def test_whole_lines_that_gloo_begins(code: str, expected: str) -> None:
    assert printed(code) == expected


def test_each_thread_writes_its_own_line() -> None:
    code = """
    say_there('[Gloo] Rank ')
    say('first ')
    say_there(0, ' is connected')
    say('[Gloo] Rank ', 'second')
    end()
    say('[Gloo] Rank ')
    say_there('\\n', 'third\\n')
    say(1)
    end()
    """
    assert printed(code) == "first [Gloo] Rank second\nthird\n"


def test_it_arrives_when_it_is_flushed_and_no_sooner() -> None:
    assert printed("say('now'); flush(cout); say('never'); os._exit(0)") == "now"


def test_once_is_enough() -> None:
    assert printed("native.LOCKED.polyxla_drop_greetings(); say('[Gloo] Rank '); end(); say('x')") == "x"
