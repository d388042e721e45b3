"""Watching the replicas of one process for the monitor. Heavy: imported in that process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch_xla
import torch_xla.core.xla_model as xm

from polyxla import presence
from polyxla.console import say
from polyxla.env import POLYXLA_STALL_TIMEOUT_S, timeout_s
from polyxla.launcher import failures
from polyxla.presence import Position
from polyxla_pjrt import env
from polyxla_pjrt.monitor.connection import Connection, Message
from polyxla_pjrt.monitor.server import Failure
from polyxla_pjrt.monitor.stalls import FRESH_S, Account

TICK_S = 1.0
"""How often a replica is looked at, in seconds; less if the timeout is short."""
QUIET_S = 10.0
"""Time without the end of a program after which a replica's device is asked whether it has work, in seconds;
less if the timeout is short. Asking delays a program that is submitted meanwhile."""
CONNECT_S = 5.0
"""Longest wait for the monitor of this host, in seconds."""
_COMPUTING = 0.1
"""A process that uses so much of one core computes; one that waits uses next to nothing."""
_ENDED = ("ExecuteTime", "CompileTime")
"""Metrics that get a sample when a program ends, or its compilation.
Source: torch_xla 2.9.0, ``runtime/pjrt_computation_client.cpp``.
"""
_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]


def watch_replicas(environ: Mapping[str, str]) -> None:
    """Watch all replicas that this process will run, if a monitor is there.

    Its notices end this process: another host has failed, or replicas of this process stall.
    """
    address = environ.get(env.POLYXLA_PJRT_MONITOR)
    if address is None:
        return
    try:
        monitor = Connection.open(address, CONNECT_S)
        monitor.send("process")
    except OSError as error:
        say(f"process {os.getpid()} cannot reach its launch's monitor at {address}: {error}")
        return
    watch = ProcessWatch(monitor, timeout_s(environ, POLYXLA_STALL_TIMEOUT_S))
    presence.listen(watch.follow)
    threading.Thread(target=watch.obey, name="polyxla-watch-monitor", daemon=True).start()


class ProcessWatch:
    """The watch over this process's replicas.

    Args:
        monitor: the connection to this host's monitor.
        timeout_s: longest wait of a replica for others, in seconds.
    """

    def __init__(self, monitor: Connection, timeout_s: float) -> None:
        self._monitor = monitor
        self._timeout_s = timeout_s
        self._watches: dict[int, ReplicaWatch] = {}
        self._lock = threading.Lock()

    def follow(self, position: Position) -> None:
        """Watch a replica from its start, and report its return; called in its thread."""
        if not position.has_returned:
            (device,) = xm.xla_real_devices([torch_xla.device()])
            self._watches[position.ordinal] = ReplicaWatch(self, position.ordinal, device, self._timeout_s)
        elif watch := self._watches.pop(position.ordinal, None):
            watch.stop()
            self.report(position.ordinal, Account(in_device=False, has_returned=True))

    def report(self, ordinal: int, account: Account) -> None:
        """Send the account of one replica, unless the launching process is gone."""
        try:
            with self._lock:
                self._monitor.send("account", ordinal=ordinal, **asdict(account))
        except OSError:
            pass

    def obey(self) -> None:
        """Act on the monitor's notices until it ends; the body of a thread."""
        try:
            while True:
                for message in self._monitor.wait():
                    self._obey(message)
        except OSError:
            return

    def _obey(self, message: Message) -> None:
        if message.pop("kind") == "failed":
            failures.give_up(Failure(**message).error())
        if any(ordinal in self._watches for ordinal in message["waiting"]):
            failures.report_stall(message["text"])


class _Look(NamedTuple):
    """What is seen at one time."""

    time_s: float
    used_s: float
    """Time for which the process has computed, on all cores."""
    ended: int
    """Number of programs and compilations that have ended."""
    spot: tuple[int, int] | None
    """Where the replica's thread is in its Python code."""


class ReplicaWatch:
    """A thread that watches the replica that makes it, and reports it while no program of its process ends.

    Whether the device has work is learned by waiting for it, in a thread of its own: torch_xla has no other
    way to ask. While the replica compiles, the device has none; but its thread stays in one call of C, and
    the process computes.

    Args:
        process: takes the accounts.
        ordinal: the replica's.
        device: torch_xla's name of the real device, such as ``TPU:0``.
        timeout_s: longest wait of a replica for others, in seconds.
    """

    def __init__(self, process: ProcessWatch, ordinal: int, device: str, timeout_s: float) -> None:
        self._process = process
        self._ordinal = ordinal
        self._device = device
        self._replica = threading.get_ident()
        self._tick_s = min(TICK_S, timeout_s / 8)
        self._quiet_s = min(QUIET_S, timeout_s / 4)
        self._probe: threading.Thread | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"polyxla-watch-{ordinal}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; the device has finished its work."""
        self._stop.set()
        self._thread.join()
        if self._probe:
            self._probe.join()

    def _watch(self) -> None:
        last, since = self._look(), time.monotonic()
        was_in_device: bool | None = None
        while not self._stop.wait(self._tick_s):
            before, last = last, self._look()
            # After a time in which this thread could not run, nothing is known of that time.
            if last.ended != before.ended or last.time_s - before.time_s > FRESH_S:
                since, was_in_device = last.time_s, None
            if last.time_s - since < self._quiet_s:
                continue
            in_device = self._is_in_device()
            stays = in_device or last.spot == before.spot
            computes = last.used_s - before.used_s > _COMPUTING * (last.time_s - before.time_s)
            if was_in_device not in (None, in_device) or (stays and computes):
                since = last.time_s
            was_in_device = in_device
            self._report(in_device, last.time_s - since)

    def _look(self) -> _Look:
        frame = sys._current_frames().get(self._replica)
        spot = (id(frame), frame.f_lasti) if frame else None
        return _Look(time.monotonic(), time.process_time(), _ended(), spot)

    def _is_in_device(self) -> bool:
        if self._probe is None or not self._probe.is_alive():
            self._probe = threading.Thread(
                target=_native._xla_wait_device_ops,
                kwargs={"devices": [self._device]},
                name=f"polyxla-watch-device-{self._ordinal}",
                daemon=True,
            )
            self._probe.start()
            self._probe.join(self._tick_s)
        return self._probe.is_alive()

    def _report(self, in_device: bool, seconds: float) -> None:
        line = next((one.line for one in presence.positions() if one.ordinal == self._ordinal), None)
        self._process.report(self._ordinal, Account(in_device, seconds, line))


def _ended() -> int:
    """Return how many programs and compilations of this process have ended."""
    metrics = (_native._xla_metric_data(name) for name in _ENDED)
    return sum(metric[0] for metric in metrics if metric)
