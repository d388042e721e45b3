"""Watching the replicas of one process for the monitor, in that process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import NamedTuple, Protocol

from polyxla import presence
from polyxla.console import say
from polyxla.env import POLYXLA_SECRET, POLYXLA_STALL_TIMEOUT_S, timeout_s
from polyxla.launcher import failures
from polyxla.presence import Position
from polyxla.tpu import env
from polyxla.tpu.monitor.connection import Message, SealedConnection
from polyxla.tpu.monitor.server import HostFailure
from polyxla.tpu.monitor.stalls import FRESH_S, Account

TICK_S = 1.0
"""How often a replica is looked at, in seconds; less if the timeout is short."""
QUIET_S = 10.0
"""Time without the end of a program after which a replica's device is asked whether it has work, in seconds;
less if the timeout is short. Asking delays a program that is submitted at that time."""
CONNECT_S = 5.0
"""Longest wait for the monitor of this host, in seconds."""
_COMPUTING = 0.1
"""A process that uses so much of one core computes; one that waits uses next to nothing."""


class DeviceProbe(Protocol):
    """What a runtime knows of one replica's device. Made in the replica's thread, used in others."""

    def ended(self) -> int:
        """Return how many programs and compilations of this process have ended."""

    def wait(self) -> None:
        """Wait until the device has finished its work."""


class DeviceWatchdog(Protocol):
    """The watchdog of the devices that polyxla-bridge emulates: its module ``engine.stall_watchdog``."""

    def on_stall(self, handler: Callable[[str, frozenset[int]], None]) -> None:
        """Call `handler` with a text once replicas wait too long, and with those that have returned."""

    def describe_here(self) -> str:
        """Describe what the replicas of this process do."""


def report_stalls(watchdog: DeviceWatchdog, retire: Callable[[Position], None]) -> None:
    """Let the launch know of a stall of emulated devices, and of where this process's replicas are.

    Args:
        watchdog: of the devices of this process.
        retire: tells the watchdog that a replica has returned, which others then must not wait for.
    """
    watchdog.on_stall(failures.report_stall)
    failures.describe_with(watchdog.describe_here)
    presence.listen(lambda position: retire(position) if position.has_returned else None)


def watch_replicas(environ: Mapping[str, str], probe: Callable[[], DeviceProbe]) -> None:
    """Watch all replicas that this process will run, if a monitor is there.

    Its notices end this process: another host has failed, or replicas of this process stall.

    Args:
        environ: the environment with the monitor's address, the job's secret and the timeout.
        probe: makes the probe of the device of the replica in whose thread it is called.
    """
    address = environ.get(env.POLYXLA_MONITOR)
    if address is None:
        return
    try:
        monitor = SealedConnection.open(address, environ[POLYXLA_SECRET], CONNECT_S)
        monitor.send("process")
    except OSError as error:
        say(f"process {os.getpid()} cannot reach its launch's monitor at {address}: {error}")
        return
    watch = ProcessWatch(monitor, timeout_s(environ, POLYXLA_STALL_TIMEOUT_S), probe)
    presence.listen(watch.follow)
    threading.Thread(target=watch.obey, name="polyxla-watch-monitor", daemon=True).start()


class ProcessWatch:
    """The watch over this process's replicas.

    Args:
        monitor: the connection to this host's monitor.
        timeout_s: longest wait of a replica for others, in seconds.
        probe: makes the probe of the device of the replica in whose thread it is called.
    """

    def __init__(self, monitor: SealedConnection, timeout_s: float, probe: Callable[[], DeviceProbe]) -> None:
        self._monitor = monitor
        self._timeout_s = timeout_s
        self._probe = probe
        self._watches: dict[int, ReplicaWatch] = {}
        self._lock = threading.Lock()

    def follow(self, position: Position) -> None:
        """Watch a replica from its start, and report its return; called in its thread."""
        if not position.has_returned:
            # The probe is made here, in the replica's thread: it asks for that thread's default device.
            watch = ReplicaWatch(self, position.ordinal, self._probe(), self._timeout_s)
            self._watches[position.ordinal] = watch
        elif ended := self._watches.pop(position.ordinal, None):
            ended.stop()
            self.report(position.ordinal, Account(in_device=False, has_returned=True))

    def report(self, ordinal: int, account: Account) -> None:
        """Send the account of one replica, unless the launching process is gone."""
        try:
            # The replicas of a process share the connection, and each has a watch in a thread of its own.
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
        except (OSError, ValueError):
            return

    def _obey(self, message: Message) -> None:
        if message.pop("kind") == "failed":
            # A signal to all hosts ends them one after the other, and this one may still save.
            if not failures.told_to_end():
                failures.give_up(HostFailure(**message).error())
            return
        # Only a process with a waiting replica reports: the launching process asks all others for their
        # position.
        if any(ordinal in self._watches for ordinal in message["waiting"]):
            failures.report_stall(message["text"])


class _Look(NamedTuple):
    """What is seen at one time."""

    time_s: float
    used_s: float
    """Time for which the process has computed, on all cores."""
    ended: int
    """Number of programs and compilations that have ended."""


class ReplicaWatch:
    """A thread that watches the replica that makes it, and reports it while no program of its process ends.

    Whether the device has work is learned by waiting for it, in a thread of its own: runtimes have no other
    way to ask. While the replica compiles, the device has none; but its thread stays in one call of C, and
    the process computes.

    Args:
        process: takes the accounts.
        ordinal: the replica's.
        probe: of the replica's device.
        timeout_s: longest wait of a replica for others, in seconds.
    """

    def __init__(self, process: ProcessWatch, ordinal: int, probe: DeviceProbe, timeout_s: float) -> None:
        self._process = process
        self._ordinal = ordinal
        self._probe = probe
        self._replica = threading.get_ident()
        self._tick_s = min(TICK_S, timeout_s / 8)
        self._quiet_s = min(QUIET_S, timeout_s / 4)
        self._waiting: threading.Thread | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"polyxla-watch-{ordinal}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; the device has finished its work."""
        self._stop.set()
        self._thread.join()
        if self._waiting:
            self._waiting.join()

    def _watch(self) -> None:
        last, since = self._look(), time.monotonic()
        was_in_device: bool | None = None
        spot: tuple[int, int] | None = None
        while not self._stop.wait(self._tick_s):
            before, last = last, self._look()
            # This thread itself may not have run, as while a compilation holds the GIL: forget what it saw.
            if last.ended != before.ended or last.time_s - before.time_s > FRESH_S:
                since, was_in_device = last.time_s, None
            if last.time_s - since < self._quiet_s:
                spot = None
                continue
            in_device = self._is_in_device()
            before_spot, spot = spot, self._spot()
            # The first look only remembers the spot: staying needs two.
            if before_spot is None and not in_device:
                continue
            # A replica in one call of C, in a process that computes, compiles: that may take minutes.
            stays = in_device or spot == before_spot
            computes = last.used_s - before.used_s > _COMPUTING * (last.time_s - before.time_s)
            # Every change of place restarts the clock.
            if was_in_device not in (None, in_device) or (stays and computes):
                since = last.time_s
            was_in_device = in_device
            self._report(in_device, last.time_s - since)

    def _look(self) -> _Look:
        return _Look(time.monotonic(), time.process_time(), self._probe.ended())

    def _spot(self) -> tuple[int, int]:
        """Return where the replica is. Rarely called: Python 3.11 has crashed here during an import."""
        frame = sys._current_frames().get(self._replica)
        return (id(frame), frame.f_lasti) if frame else (0, 0)

    def _is_in_device(self) -> bool:
        if self._waiting is None or not self._waiting.is_alive():
            name = f"polyxla-watch-device-{self._ordinal}"
            self._waiting = threading.Thread(target=self._probe.wait, name=name, daemon=True)
            self._waiting.start()
            # The wait may last until the job ends, so it keeps its thread, which is asked again at the next
            # tick.
            self._waiting.join(self._tick_s)
        return self._waiting.is_alive()

    def _report(self, in_device: bool, seconds: float) -> None:
        own = (position for position in presence.positions() if position.ordinal == self._ordinal)
        line = next((position.line for position in own), None)
        self._process.report(self._ordinal, Account(in_device, seconds, line))
