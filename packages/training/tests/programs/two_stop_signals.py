"""Receive two signals under a StopSignal: the first sets its flag, the second ends the process."""

from __future__ import annotations

import signal

from polyxla_training.checkpoint.stop_signal import StopSignal

with StopSignal() as stop:
    signal.raise_signal(signal.SIGTERM)
    print("first", bool(stop), flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("second")
