"""Watchdog for replicas that never reach a collective in which others wait for them."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from polyxla_bridge.env import POLYXLA_STALL_TIMEOUT_S

if TYPE_CHECKING:
    from polyxla_bridge.engine.engine import DeviceActivity, Engine


STALLED = 5
"""Exit code of a process whose replicas stalled."""
DEVICE_THREAD = "polyxla-device"
"""Prefix of the names of the threads that run programs; `polyxla_bridge.engine.local_engine` makes them."""
XLA_POOL = "tf_XLAEigen"
"""Name of the threads of XLA's pool. Source: jaxlib 0.10.2, /proc/self/task."""
OWN_THREADS = (
    DEVICE_THREAD,
    "polyxla-read",
    "polyxla-buffers",
    "polyxla-transfers",
    "polyxla-collect",
    "polyxla-watch",
    "polyxla-parent",
)
"""Name prefixes of threads that a report leaves out: the engine's and the launcher's."""
REPORT_S = 5.0
"""Longest time that a report may take, in seconds."""
TICK_S = 1.0
"""Interval between two checks, in seconds; less if the timeout is short."""
RETIRED_TIMEOUT_S = 6.0
"""Longest wait for a replica that will run no more programs, in seconds. That replica has done its part in
all its collectives; the others may still move data or start to compute in this time."""

Handler = Callable[[str, frozenset[int]], None]
"""Called with the report, and with the replicas that have returned if the others wait for them."""


def _end(text: str, returned: frozenset[int]) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    # A thread that waits inside a collective cannot be ended in any other way.
    os._exit(STALLED)


_handlers: list[Handler] = [_end]


def on_stall(handler: Handler) -> None:
    """Choose the function that is called with the report when a replica stalls.

    By default the report goes to standard error, and the process ends with exit code `STALLED`.
    """
    _handlers[:] = [handler]


def report(engine: Engine, text: str) -> None:
    """Report why other replicas wait for a replica of this process; its device's thread calls this.

    Returns once the report is made, so that the error that the caller then raises cannot overtake it.
    """
    content = f"{text}\n{describe(engine)}"
    # A handler may end the job, which waits for the devices' threads, so it needs a thread of its own.
    thread = threading.Thread(target=_handlers[0], args=(content, frozenset()), name="polyxla-watch")
    thread.daemon = True
    thread.start()
    thread.join(REPORT_S)


def describe(engine: Engine) -> str:
    """Report what this process's replicas are doing, and the stack of each of its threads."""
    lines = [f"process {engine.process_index} (pid {os.getpid()}):"]
    lines += [f"  {activity}" for activity in engine.activities()]
    return "\n".join([*lines, stacks()])


def describe_here() -> str:
    """Report as `describe` does for the engine of this process; only the stacks if there is no engine."""
    return describe(_watched[0]) if _watched else stacks()


def stacks() -> str:
    """Return the Python stack of every thread of this process, except `OWN_THREADS`."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, "unknown")
        if not name.startswith(OWN_THREADS):
            lines.append(f"thread {name}:")
            lines += "".join(traceback.format_stack(frame)).rstrip().splitlines()
    return "\n".join(lines)


def retire(ordinal: int) -> None:
    """Publish that a replica of this process has returned, because waiting for it would never end."""
    for engine in _watched:
        engine.retire(ordinal)


def retire_here() -> None:
    """Publish that all replicas of this process have returned, whatever the numbers of their devices."""
    for engine in _watched:
        for device in engine.devices:
            if device.is_local:
                engine.retire(device.index)


_watched: list[Engine] = []


class JobProgress(Protocol):
    """What the processes of a job publish about their progress."""

    def beat(self) -> None:
        """Publish a heartbeat: this process compiles or computes, so waiting for it is not a stall."""

    def heartbeats(self) -> dict[str, str]:
        """Return the last heartbeat of each process; a process at work changes its own."""

    def retire(self, replica: int) -> None:
        """Publish that a replica will run no more programs."""

    def retired(self) -> frozenset[int]:
        """Return the replicas that will run no more programs."""


class StallWatchdog:
    """Thread that checks whether the replicas of this process have stalled.

    Only a program with collectives waits for other replicas. As long as any process of the job compiles or
    computes, the others wait for a reason: such a process publishes heartbeats, and a stall is counted from
    the last heartbeat of any process. A wait for a replica that has retired is a stall after
    `RETIRED_TIMEOUT_S`.

    Args:
        engine: its devices are watched.
        progress: exchanges heartbeats with the other processes.
        is_busy: returns whether this process is compiling, or computes where it cannot be seen.
        timeout_s: longest wait of a replica, in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        progress: JobProgress,
        is_busy: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._is_busy = is_busy
        self._timeout_s = timeout_s
        # With four checks in a timeout, heartbeats come well before it ends.
        self._tick_s = min(TICK_S, timeout_s / 4)
        self._heartbeats: dict[str, str] = {}
        self._last_progress = time.monotonic()
        self._stop = threading.Event()
        _watched.append(engine)
        self._thread = threading.Thread(target=self._watch, name="polyxla-watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(self._tick_s):
            activities = self._engine.activities()
            try:
                found = self._check(activities)
            except Exception:
                # The key-value store ended with process 0; jaxlib notices that and ends this process.
                return
            if found:
                text, returned = found
                _handlers[0](f"{text}\n{describe(self._engine)}", returned)
                return

    def _check(self, activities: list[DeviceActivity]) -> tuple[str, frozenset[int]] | None:
        """Publish a heartbeat if this process makes progress, and report its stalled replicas."""
        lasting = [
            activity
            for activity in activities
            if activity.program is not None and activity.seconds > self._tick_s
        ]
        waiting = [activity for activity in lasting if activity.collectives]
        if self._makes_progress(activities, lasting, waiting):
            self._progress.beat()
        if not waiting:
            return None
        # Read other processes' heartbeats only while a replica here waits, because each read is a request.
        if (heartbeats := self._progress.heartbeats()) != self._heartbeats:
            self._heartbeats, self._last_progress = heartbeats, time.monotonic()
        quiet_s = time.monotonic() - self._last_progress
        # A stall needs both: a long wait of the replica, and a long time since any process made progress.
        patience_s = min(self._timeout_s, RETIRED_TIMEOUT_S)
        if late := [activity for activity in waiting if min(activity.seconds, quiet_s) > patience_s]:
            retired = self._progress.retired()
            if deserted := [activity for activity in late if self._needs(activity, retired)]:
                return _report_retired(deserted, retired), retired
        if stalled := [activity for activity in late if min(activity.seconds, quiet_s) > self._timeout_s]:
            return self._report(stalled), frozenset()
        return None

    def await_report(self, device: int) -> None:
        """Wait for the report that a replica has returned, if a program failed for that.

        The program's own error, which would come first, only says that another process has ended. A replica
        that an exception has ended counts as returned, too; then the launcher ends this process before the
        report. The device's thread calls this.
        """
        try:
            retired = self._progress.retired()
        except Exception:
            # The key-value store may have ended with process 0.
            return
        running = next(each for each in self._engine.activities() if each.device == device)
        if running.collectives and self._needs(running, retired):
            self._thread.join(RETIRED_TIMEOUT_S + REPORT_S)

    def _needs(self, activity: DeviceActivity, retired: frozenset[int]) -> bool:
        """Return whether a replica's program needs one that has retired."""
        # If all others have returned, the program's groups do not matter.
        if retired >= self._others(activity.device):
            return True
        # An empty group stands for all replicas.
        return any(
            retired & (group or self._others(activity.device)) and (not group or activity.device in group)
            for group in activity.groups
        )

    def _others(self, replica: int) -> frozenset[int]:
        return frozenset(device.index for device in self._engine.devices if device.index != replica)

    def _makes_progress(
        self,
        activities: list[DeviceActivity],
        lasting: list[DeviceActivity],
        waiting: list[DeviceActivity],
    ) -> bool:
        # A check rarely falls into a short program, but a device that runs many of them has always started
        # or finished one less than a tick ago.
        changed = any(activity.seconds < self._tick_s for activity in activities)
        computes = len(lasting) > len(waiting) or (bool(waiting) and _is_computing())
        return self._is_busy() or changed or computes

    def _report(self, stalled: list[DeviceActivity]) -> str:
        waits = "; ".join(str(activity) for activity in stalled)
        return (
            f"polyxla: a replica is stuck: the other replicas do not join its collectives ({waits}). Another "
            "replica runs other programs, because of a condition that is not the same on all replicas, or it "
            "has ended, or it hangs. The stacks of this process's replicas follow. Replicas may wait for "
            f"each other for {POLYXLA_STALL_TIMEOUT_S}={self._timeout_s:g} seconds."
        )

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._engine in _watched:
            _watched.remove(self._engine)
        # A handler may close the engine on the watchdog's own thread, which cannot join itself.
        if self._thread is not threading.current_thread():
            self._thread.join(self._tick_s + 1)


def _report_retired(waiting: list[DeviceActivity], retired: frozenset[int]) -> str:
    waits = "; ".join(str(activity) for activity in waiting)
    return (
        f"polyxla: a replica is stuck: it waits for one that has returned ({waits}; returned: "
        f"{', '.join(map(str, sorted(retired)))}). All replicas must take part in each step. The stacks of "
        "this process's replicas follow."
    )


def _is_computing() -> bool:
    """Return whether a program computes in this process; one that waits in a collective runs no thread.

    XLA computes on the devices' threads and on those of its pool. A thread that waits for a processor, or for
    its memory, counts as running.
    """
    devices = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(DEVICE_THREAD)}
    # A list, because an iterator that is left early is closed late, with a warning.
    for task in list(os.scandir("/proc/self/task")):
        try:
            stat = Path(task, "stat").read_text()
        except OSError:
            # The thread has just ended.
            continue
        # The name is in parentheses, and may itself contain spaces and parentheses.
        name, _, rest = stat.partition(" (")[2].rpartition(")")
        if (name == XLA_POOL or int(task.name) in devices) and rest.split()[0] in "RD":
            return True
    return False


class DeviceProgress(JobProgress, Protocol):
    """What the processes of a job on a plugin's devices tell each other. Any thread may use it.

    An accelerator does not show whether its program computes or waits. All programs compute if no device of
    the job is without one, and a process sees only its own devices.
    """

    def exchange(self, is_full: bool) -> bool:
        """Tell the other processes whether each device here has a program; return whether each of all has."""


class OwnProgress(DeviceProgress):
    """The progress of a job in one process."""

    def __init__(self) -> None:
        self._beats = 0
        self._retired: set[int] = set()

    def beat(self) -> None:
        """Count a heartbeat."""
        self._beats += 1

    def heartbeats(self) -> dict[str, str]:
        """Return the number of heartbeats, by the only process."""
        return {"0": str(self._beats)}

    def retired(self) -> frozenset[int]:  # noqa: D102  (see `JobProgress`)
        return frozenset(self._retired)

    def exchange(self, is_full: bool) -> bool:
        """Return the same: there is no other process."""
        return is_full

    def retire(self, replica: int) -> None:  # noqa: D102  (see `JobProgress`)
        self._retired.add(replica)
