"""``relay.py SOCKET HOST PROGRAM...``: the local end of one host's program, without Ray.

Passes standard input to the process that holds the connection to Ray, and the answers to standard output.
Each host has a relay, so it imports as little as possible.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys

READ_BYTES = 1 << 16


def main(path: str, host: str, *program: str) -> None:
    """Relay until the other end closes."""
    with socket.socket(socket.AF_UNIX) as connection:
        # A path may be longer than the 107 characters of a socket's address.
        os.chdir(os.path.dirname(path))  # noqa: PTH120  pathlib takes long to import
        connection.connect(os.path.basename(path))  # noqa: PTH119
        connection.sendall(json.dumps({"host": int(host), "program": program}).encode() + b"\n")
        waiting = [connection.fileno(), sys.stdin.fileno()]
        while connection.fileno() in waiting:
            ready, _, _ = select.select(waiting, [], [])
            if sys.stdin.fileno() in ready:
                if data := os.read(sys.stdin.fileno(), READ_BYTES):
                    connection.sendall(data)
                else:
                    connection.shutdown(socket.SHUT_WR)
                    waiting.remove(sys.stdin.fileno())
            if connection.fileno() in ready:
                if data := connection.recv(READ_BYTES):
                    while data:
                        # A pipe may take only a part.
                        data = data[os.write(sys.stdout.fileno(), data) :]
                else:
                    return


if __name__ == "__main__":
    main(*sys.argv[1:])
