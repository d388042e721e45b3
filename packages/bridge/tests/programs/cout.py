"""Writes to C++'s std::cout through the filter for gloo's lines, as the code on the command line says."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor

from polyxla_bridge import native

library = ctypes.CDLL("libstdc++.so.6")
cout = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cout")))
text = library["_ZStlsISt11char_traitsIcEERSt13basic_ostreamIcT_ES5_PKc"]
number, put, flush = library["_ZNSolsEi"], library["_ZNSo3putEc"], library["_ZNSo5flushEv"]
other = ThreadPoolExecutor(1)


def say(*pieces: str | int) -> None:
    """Write each piece by one call of ``<<``."""
    for piece in pieces:
        text(cout, piece.encode()) if isinstance(piece, str) else number(cout, piece)


def say_there(*pieces: str | int) -> None:
    """Write in another thread."""
    other.submit(say, *pieces).result()


def end() -> None:
    """End the line, and flush."""
    put(cout, ctypes.c_char(b"\n"))
    flush(cout)


def interleaved_threads() -> None:
    """Write lines of gloo and of others from two threads at the same time."""
    say_there("[Gloo] Rank ")
    say("first ")
    say_there(0, " is connected")
    say("[Gloo] Rank ", "second")
    end()
    say("[Gloo] Rank ")
    say_there("\n", "third\n")
    say(1)
    end()


if __name__ == "__main__":
    native.LOCKED.polyxla_drop_greetings()
    exec(sys.argv[1])
