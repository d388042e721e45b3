"""What the launching process sees of a process that ends."""

from __future__ import annotations

import os
import signal
import subprocess

from polyxla.launcher.process_handle import is_ending
from polyxla_testing.processes import is_in_state, wait_until


def test_a_killed_process_is_ending_until_its_end_is_read() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_ending(process.pid)
        process.kill()
        # Not read yet: it is a zombie at the latest.
        wait_until(lambda: is_ending(process.pid), "the end")
    assert not is_ending(process.pid)


def test_a_stopped_process_is_ending_if_it_was_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_in_state("T", process.pid), "the stop")
        assert not is_ending(process.pid)
        process.kill()
        wait_until(lambda: is_ending(process.pid), "the end")


def test_this_process_is_not_ending() -> None:
    assert not is_ending(os.getpid())
