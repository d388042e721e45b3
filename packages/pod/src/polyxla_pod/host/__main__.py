"""``python -m polyxla_pod.host``: serve one connection on standard input and output."""

from __future__ import annotations

import os
import sys

from polyxla_pod.host.session import HostSession


def main() -> None:
    """Serve the connection until it ends."""
    # The messages get a descriptor of their own; whatever else prints goes to standard error.
    send = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    HostSession(sys.stdin.fileno(), send).run()


if __name__ == "__main__":
    main()
