"""The trial: an all-reduce on the chosen runtime, in a process of its own, with a deadline."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyxla import PolyxlaError
from polyxla.plugin import POLYXLA_COMPILE_CACHE, signal_name
from polyxla_tools.doctor.findings import Finding, counted, ok, problem
from polyxla_tools.doctor.runtimes import RuntimeFacts, check_environment
from polyxla_tools.doctor.trial_process import Measured

MOST_EMULATED = 8
"""Most devices of an emulated TPU that the trial uses: each is a process or a thread of this machine."""
STOP_GRACE_S = 10.0
"""Time for the trial's processes to end after SIGTERM, in seconds, before they are killed."""


@dataclass(frozen=True)
class TrialPlan:
    """The runtime and the devices of a trial.

    Attributes:
        runtime: the runtime's name.
        devices: the indices of the devices.
        why: why the trial uses no more devices; empty if no reason is needed.
    """

    runtime: str
    devices: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True)
class TrialResult:
    """How the trial ended.

    Attributes:
        plan: the runtime and devices that it used.
        replicas: what each replica measured, by ordinal; empty if it failed.
        error: why it failed; None if it did not.
    """

    plan: TrialPlan
    replicas: tuple[Measured, ...] = ()
    error: str | None = None

    @property
    def replica_bytes(self) -> int | None:
        """The peak memory of a replica, in bytes; None if the trial failed."""
        # Replicas that are threads share one process, whose memory counts once.
        processes = {replica["process"]: replica["peak_bytes"] for replica in self.replicas}
        return math.ceil(sum(processes.values()) / len(self.replicas)) if self.replicas else None


def plan_trial(environ: Mapping[str, str], facts: RuntimeFacts, *, is_emulated: bool) -> TrialPlan | None:
    """Return what the trial runs on; None if no runtime can be used.

    Args:
        environ: the environment of the trial.
        facts: the runtimes.
        is_emulated: whether the TPU is emulated.
    """
    if not facts.selection or facts.error:
        return None
    runtime, found = facts.selection.runtime, facts.selection.discovery
    # A collective of the whole slice would wait for the other hosts, on which nothing runs.
    if found.host_count > 1 and not is_emulated:
        why = "the other hosts are left out: `polyxla pod run -- polyxla doctor` asks each"
        return TrialPlan(runtime, facts.devices[:1], why)
    # A TPU is tried as a whole, because some faults concern one chip only.
    if found.kind == "TPU":
        devices = facts.devices[:MOST_EMULATED] if is_emulated else facts.devices
    else:
        # On the CPU a second device costs little, and an all-reduce on a single one would prove nothing.
        devices = facts.devices if len(facts.devices) > 1 or not found.growable else (0, 1)
    why = "" if len(devices) > 1 else "the runtime has one"
    try:
        check_environment(environ, facts.selection, devices)
    except PolyxlaError as error:
        # The first device alone still shows whether the runtime works.
        return TrialPlan(runtime, facts.devices[:1], f"several cannot be used: {error}")
    return TrialPlan(runtime, devices, why)


def run_trial(environ: Mapping[str, str], plan: TrialPlan, timeout_s: float) -> TrialResult:
    """Run the trial, and end all its processes.

    Args:
        environ: the environment of the trial.
        plan: what to run on.
        timeout_s: longest time for everything, in seconds.
    """
    with tempfile.TemporaryDirectory(prefix="polyxla-doctor-") as directory:
        answer, log = Path(directory, "answer"), Path(directory, "log")
        arguments = [plan.runtime, json.dumps(plan.devices), repr(time.monotonic()), str(answer)]
        command = [sys.executable, "-m", "polyxla_tools.doctor.trial_process", *arguments]
        # A cached program would hide how long its compilation takes.
        variables = {**environ, POLYXLA_COMPILE_CACHE: "off"}
        with log.open("wb") as output, _started(command, variables, output) as process:
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                last = _last_line(log)
                after = f"; its last line was: {last}" if last else ""
                return TrialResult(plan, error=f"it did not end within {timeout_s:g} s{after}")
        return _outcome(plan, answer, log, code)


@contextlib.contextmanager
def _started(
    command: list[str], environ: Mapping[str, str], output: Any
) -> Iterator[subprocess.Popen[bytes]]:
    # The session of its own keeps Ctrl-C from the trial: this process then ends the whole group.
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        # SIGTERM lets the launch end its replicas and print what they were doing.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE_S)
    # The leader has ended, but replicas that hang may be left in its group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(plan: TrialPlan, answer: Path, log: Path, code: int) -> TrialResult:
    found: dict[str, Any] = {}
    # On a full disk there may be a file without its content.
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(answer.read_text())
    if code == 0 and "replicas" in found:
        return TrialResult(plan, tuple(found["replicas"]))
    if code < 0:
        ended = f"its process was ended by {signal_name(-code)}"
        return TrialResult(plan, error=f"{ended}: {_last_line(log)}".removesuffix(": "))
    return TrialResult(plan, error=found.get("error") or _last_line(log) or f"exit code {code}")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def check_trial(outcome: TrialResult) -> list[Finding]:
    """Judge the trial: it must have ended, with the right sum in every replica."""
    count, runtime = len(outcome.plan.devices), outcome.plan.runtime
    what = f"an all-reduce on {counted(count, 'replica')} of {runtime}"
    if outcome.error is not None:
        fix = f"Run it without a deadline, to see all its lines: {_by_hand(outcome.plan)}"
        return [problem("trial", f"{what} failed: {outcome.error}".removesuffix("."), fix)]
    # Each replica adds its ordinal plus one, since an ordinal of 0 would not show in the sum.
    right = count * (count + 1) / 2
    wrong = [replica["total"] for replica in outcome.replicas if replica["total"] != right]
    if wrong or len(outcome.replicas) != count:
        fix = "Report this with the block that `polyxla doctor --paste` prints."
        return [problem("trial", f"{what} resulted in {wrong} instead of {right:g}", fix)]
    first_s = max(replica["first_s"] for replica in outcome.replicas)
    step_s = max(replica["step_s"] for replica in outcome.replicas)
    why = f"; {outcome.plan.why}" if outcome.plan.why else ""
    return [ok("trial", f"{what}: first result after {first_s:.1f} s, then {step_s * 1e3:.2f} ms each{why}")]


def _by_hand(plan: TrialPlan) -> str:
    arguments = [plan.runtime, json.dumps(plan.devices), "0", "answer.json"]
    # By hand the start time does not matter: the user wants to see the output.
    return shlex.join([sys.executable, "-m", "polyxla_tools.doctor.trial_process", *arguments])
