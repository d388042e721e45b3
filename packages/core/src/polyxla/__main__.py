"""The command ``polyxla``, and ``python -m polyxla``."""

from __future__ import annotations

import signal

from polyxla.console import end_interrupted


def main() -> None:
    """Run the command; Ctrl-C ends it with one line, also while its modules are imported."""
    # Installed before the imports below, which take most of the command's time. A shell script makes what it
    # starts in the background ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: end_interrupted())
    from polyxla.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
