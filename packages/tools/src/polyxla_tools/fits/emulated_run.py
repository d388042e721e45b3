"""Running a script on the emulated TPU until it asks for no new programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from polyxla import PolyxlaError
from polyxla.plugin import POLYXLA_DEVICES, POLYXLA_RUNTIME, tpu_env
from polyxla_bridge.env import POLYXLA_DEVICE_MEMORY, POLYXLA_LIBTPU_PROGRAMS
from polyxla_tools.fits.collected import CollectedProgram, Logs, programs
from polyxla_tools.fits.target import Framework, TargetTpu

TICK_S = 0.5
GRACE_S = 10.0
"""Time for the script's processes to end after SIGTERM, in seconds, before they are killed."""
SHOWN_LINES = 20
_UNTIL_PARENT_ENDS = """if True:
    import ctypes, os, signal, sys
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    # The parent may have ended before.
    if os.getppid() == int(sys.argv[1]):
        os.execv(sys.argv[2], sys.argv[2:])"""
"""Source: PR_SET_PDEATHSIG in ``man 2 prctl``."""
REPLACED = (POLYXLA_DEVICES, POLYXLA_DEVICE_MEMORY, "PJRT_DEVICE")
"""Variables that choose other devices, which would contradict ``--on``, or limit the emulated memory."""


class ScriptFailedError(PolyxlaError):
    """The script failed on the emulated TPU, took too long, or sent no program to it."""


@dataclass(frozen=True)
class EmulatedRun:
    """A run of a script on the emulated TPU.

    Attributes:
        command: the script and its arguments, or ``-m``, a module and its arguments.
        target: the TPU.
        framework: the script's.
        steps: how many steps in a row must bring no new program; 0 runs the script to its end.
        timeout_s: longest run, in seconds.
    """

    command: Sequence[str]
    target: TargetTpu
    framework: Framework
    steps: int
    timeout_s: float

    def collect(
        self, directory: Path, environ: Mapping[str, str], detail: Callable[[str], None]
    ) -> list[CollectedProgram]:
        """Run the script, and return its programs.

        Args:
            directory: an empty or new one, for programs and the script's output.
            environ: of this process.
            detail: shows how far the run is.

        Raises:
            ScriptFailedError: the script failed, did not end in time, or used no device.
        """
        directory.mkdir(parents=True, exist_ok=True)
        logs, output = Logs(directory), directory / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*ending_with_this_process(), sys.executable, "-m", "polyxla", "run", *self.command],
                env=self.environ(environ, directory),
                # A script that asks a question fails at once, instead of waiting until the time is over.
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # The group of its own lets replicas and loader workers end with the script.
                start_new_session=True,
            )
            try:
                is_settled = self._wait(process, logs, output, detail)
            finally:
                end_group(process)
        # The processes may have written more after the last turn of the loop.
        logs.read()
        # A script that was stopped on purpose ends with a signal, which is not a failure.
        self._check(0 if is_settled else process.returncode, logs, output)
        return programs(directory, logs)

    def _wait(
        self, process: subprocess.Popen[bytes], logs: Logs, output: Path, detail: Callable[[str], None]
    ) -> bool:
        """Wait until the script has ended or settled; return whether it has settled."""
        started, last_new_s = time.monotonic(), 0.0
        while process.poll() is None:
            has_new, seconds = logs.read(), time.monotonic() - started
            last_new_s = seconds if has_new else last_new_s
            if self.has_settled(logs.repeats, last_new_s, seconds):
                return True
            # Checked after the steps: a script that settles just at the limit has not failed.
            if seconds > self.timeout_s:
                raise ScriptFailedError(
                    f"the script has not ended, nor repeated its programs {self.steps} times, in "
                    f"{self.timeout_s:g} s (--timeout). {_tail(output)}"
                )
            detail(f"{len(logs.stacks)} programs, and {logs.repeats} steps without a new one")
            time.sleep(TICK_S)
        return False

    def has_settled(self, repeats: int, last_new_s: float, now_s: float) -> bool:
        """Return whether enough steps have brought no new program, so that the script can be stopped.

        With an eager framework, the equal layers of a network repeat its programs within a step, as steps do.
        So as much time must have passed since the last new program as from the script's start to that
        program: a first step, which compiles, takes longer than the equal layers in it.

        Args:
            repeats: how often a program was executed since the last new one.
            last_new_s: when that was, in seconds after the script's start.
            now_s: seconds since the script's start.
        """
        if not self.steps or repeats < self.steps:
            return False
        return not self.framework.is_eager or now_s >= 2 * last_new_s

    def _check(self, code: int, logs: Logs, output: Path) -> None:
        if code:
            raise ScriptFailedError(f"the script failed on the emulated TPU, code {code}. {_tail(output)}")
        if not logs.stacks:
            raise ScriptFailedError(f"the script has used no device of the emulated TPU. {_tail(output)}")

    def environ(self, environ: Mapping[str, str], directory: Path) -> dict[str, str]:
        """Return the variables of this process, with those that give the script the emulated TPU."""
        # Other variables are the script's business, and reach it unchanged.
        kept = {
            name: value
            for name, value in environ.items()
            # Variables of TPU nodes would contradict the runtime, which is set below.
            if name not in REPLACED and not name.startswith("XRT_")
        }
        return {
            **kept,
            POLYXLA_RUNTIME: self.framework.runtime,
            tpu_env.POLYXLA_EMULATE: self.target.name,
            POLYXLA_LIBTPU_PROGRAMS: str(directory),
            **self.framework.variables,
        }


def ending_with_this_process() -> tuple[str, ...]:
    """Return what to put before a command to which the kernel is to send SIGTERM when this process ends.

    An endless script would otherwise outlive a command that is killed. The thread that starts it must be the
    main one: the kernel looks at the thread.
    """
    return (sys.executable, "-I", "-S", "-c", _UNTIL_PARENT_ENDS, str(os.getpid()))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, which are a process group of their own."""
    with suppress(ProcessLookupError):
        # SIGTERM lets a launch end its replicas in order.
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        # The script has ended, but loader workers that ignore SIGTERM are still in its group.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GRACE_S)


def _tail(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    return "Its last lines:\n  " + "\n  ".join(lines) if lines else "It has printed nothing."
