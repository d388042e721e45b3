"""Faults at random, for minutes or hours: each ends in success or in an error that says what happened.

``python integration/faults.py --minutes 60`` runs jobs one after the other. In each, at a random moment, one
process of a named point is killed, stopped, paused, or left without space for files or without descriptors.
The job must then succeed, or end with a named error, within `DEADLINE_S`; its services must still work;
and no process, socket or file of the job may be left. The same seed picks the same faults at the same points.
`nox -s faults` runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_S = 240.0
"""Longest time of a job with a fault, in seconds: a start, a stall, and the end, on a slow machine."""
START_S = 120.0
"""Longest wait for a replica's first answer, and for a service, in seconds."""
STALL_S = 40.0
"""Longest wait of a replica for others, in seconds; healthy ones wait as well, beside other tests."""
LOST_S = 20.0
"""Longest silence of a host, in seconds."""
STARTING_S, RUN_S, RUNNING = 10.0, 3.0, 0.6
"""Latest moments of a fault, in seconds after the start and the first step; the share of the second kind."""
LIMITS = {"POLYXLA_START_TIMEOUT_S": START_S, "POLYXLA_STALL_TIMEOUT_S": STALL_S}
UNHARMED = 0.1
"""The share of jobs without a fault, which must succeed."""
PAUSE_S = 3.0
"""How long a paused process stands still, in seconds."""
LEFT_S = 30.0
"""Longest time until a job's remaining processes have ended, in seconds."""
OURS = ("POLYXLA_", "PJRT_", "TPU_", "XRT_")
"""Prefixes of variables that jobs do not inherit."""
MARK = "FAULTS_JOB"
"""A variable that marks all processes of a job."""
PROGRAM = Path(__file__).parent / "programs" / "steps_under_faults.py"
STAND_IN = '#!/bin/sh\nfor last; do :; done\nsh -c "$last"\n'
NAMED = re.compile(
    r"^(?:\[w\d\] )?(?:polyxla: error: .{10,}"
    r"|(?:polyxla\.errors\.)?\w*(?:Lost|Stalled|Usage|Pjrt|Broken)\w*: .+"
    r"|RuntimeError: (?:nothing listened on .+ did not start|.+ did not connect to .+ within .+)"
    r"|RuntimeError: jaxlib's coordination service (?:did not start|cannot listen).+"
    r"|.*(?:No space left|File too large|Too many open files).*|polyxla: interrupted)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Process:
    """A process of a job, as the kernel lists it."""

    pid: int
    parent: int
    command: str
    state: str


Find = Callable[["Job", Sequence[Process]], list[Process]]


def having(text: str, *, parent: str | None = None) -> Find:
    """Return a finder of the processes with a text in their command line, and one in their parent's."""

    def find(_: Job, processes: Sequence[Process]) -> list[Process]:
        commands = {process.pid: process.command for process in processes}
        return [
            process
            for process in processes
            if text in process.command and (parent is None or parent in commands.get(process.parent, ""))
        ]

    return find


def root(job: Job, processes: Sequence[Process]) -> list[Process]:
    """Find the process that was started as the job."""
    return [process for process in processes if process.pid == job.process.pid]


def fork_server(job: Job, processes: Sequence[Process]) -> list[Process]:
    """Find the fork servers: replicas have their command line, and them for parents."""
    both = having("launcher.fork_server")(job, processes)
    pids = {process.pid for process in both}
    return [process for process in both if process.parent not in pids]


def replica(job: Job, processes: Sequence[Process]) -> list[Process]:
    """Find the processes that a fork server has forked."""
    servers = {server.pid for server in fork_server(job, processes)}
    return [process for process in processes if process.parent in servers]


def forks_of(text: str) -> Find:
    """Return a finder of the processes that a process with a text in its command line has forked."""
    return having(text, parent=text)


def original(text: str) -> Find:
    """Return a finder of a process with a text in its command line that is not a fork of another."""

    def find(job: Job, processes: Sequence[Process]) -> list[Process]:
        forks = forks_of(text)(job, processes)
        return [process for process in having(text)(job, processes) if process not in forks]

    return find


def granting_fork(job: Job, processes: Sequence[Process]) -> list[Process]:
    """Find the fork of a worker of several jobs that grants its cores: the first one."""
    return sorted(forks_of("polyxla worker")(job, processes), key=lambda process: process.pid)[:1]


def job_fork(job: Job, processes: Sequence[Process]) -> list[Process]:
    """Find the forks of such a worker that serve a job each."""
    return sorted(forks_of("polyxla worker")(job, processes), key=lambda process: process.pid)[1:]


@dataclass(frozen=True)
class Stage:
    """A kind of job.

    Attributes:
        name: how it is called.
        points: the finder of the processes of each named point.
        watched: the points whose silence another process must notice.
        command: the job's command, after ``python -m polyxla``.
        service: the command of what serves it, after the same; None if it needs nothing.
        variables: its environment, besides this process's.
        results: the text that each launch prints at its end.
    """

    name: str
    points: dict[str, Find]
    watched: frozenset[str]
    command: list[str]
    service: list[str] | None = None
    variables: dict[str, str] = field(default_factory=dict)
    results: tuple[str, ...] = ("RESULT [0, 1]",)


SERVICES = ("supervisor", "worker", "link", "warm process")
"""Points that serve more than one job."""
TRAINING = ["run", str(PROGRAM)]
STAGES = [
    Stage(
        "launch",
        {
            "launcher": root,
            "fork server": fork_server,
            "replica": replica,
            "coordination service": having("coordination_service"),
        },
        frozenset({"replica"}),
        TRAINING,
        variables={"PJRT_DEVICE": "CPU"},
    ),
    Stage(
        "emulated TPU",
        {"launcher and monitor": root, "fork server": fork_server, "replica": replica},
        frozenset({"replica"}),
        TRAINING,
        variables={"POLYXLA_EMULATE": "v5e-4"},
    ),
    Stage(
        "worker",
        {
            "launcher": root,
            "fork server": fork_server,
            "replica": replica,
            "lease holder": having("lease_holder"),
            "supervisor": original("polyxla worker"),
            "worker": forks_of("polyxla worker"),
            "link": having("--relay"),
        },
        frozenset({"replica", "worker", "link", "lease holder"}),
        TRAINING,
        ["worker", "--address", "127.0.0.1:0", "--devices", "2", "--json"],
    ),
    Stage(
        "shared worker",
        {
            "launcher": root,
            "replica": replica,
            "lease holder": having("lease_holder"),
            "supervisor": original("polyxla worker"),
            "worker": granting_fork,
            "job's process": job_fork,
        },
        frozenset({"replica", "job's process", "lease holder"}),
        TRAINING,
        ["worker", "--address", "127.0.0.1:0", "--devices", "4", "--jobs", "2", "--json"],
    ),
    Stage(
        "warm",
        {
            "client": root,
            "warm process": original("polyxla_tools.warm.server"),
            "program and replicas": forks_of("polyxla_tools.warm.server"),
        },
        frozenset(),
        TRAINING,
        ["warm", "on"],
        {"PJRT_DEVICE": "CPU"},
    ),
    Stage(
        "pod",
        {
            "launcher": root,
            "connection": having("/bin/ssh"),
            "host session": having("polyxla_pod.host", parent="sh -c"),
            "command": having(str(PROGRAM)),
        },
        frozenset({"host session"}),
        [
            *("pod", "run", "--hosts", "one,two", "--python", sys.executable, "--lost-after", f"{LOST_S:g}"),
            *("--grace", "2", "--connect-timeout", f"{START_S:g}", "--env", "PJRT_DEVICE=CPU"),
            *("--", sys.executable, str(PROGRAM)),
        ],
    ),
    Stage(
        "pod of TPU hosts",
        {
            "launcher": root,
            "host session": having("polyxla_pod.host", parent="sh -c"),
            "launch and monitor": having(f"{sys.executable} {PROGRAM}", parent="polyxla_pod.host"),
            "fork server": fork_server,
            "replica": replica,
        },
        frozenset({"host session", "replica"}),
        [
            *("pod", "run", "--hosts", "127.0.0.1,127.0.0.2", "--python", sys.executable),
            *("--lost-after", f"{LOST_S:g}", "--grace", "2", "--connect-timeout", f"{START_S:g}"),
            *("--env", "POLYXLA_EMULATE=v4-16", "--env", "FAULTS_DEVICES=null"),
            *(f"--env={name}={value:g}" for name, value in LIMITS.items()),
            *("--", sys.executable, str(PROGRAM)),
        ],
        results=("RESULT [0, 1, 2, 3]", "RESULT [4, 5, 6, 7]"),
    ),
]


def kill(process: Process) -> None:
    """End it without a chance to react."""
    os.kill(process.pid, signal.SIGKILL)


def stop(process: Process) -> None:
    """Let it stand still until the job has ended."""
    os.kill(process.pid, signal.SIGSTOP)


def pause(process: Process) -> None:
    """Let it stand still for a while."""
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    # Others may have ended it by now.
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)


def full_disk(process: Process) -> None:
    """Let none of its files grow."""
    hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))


def no_descriptors(process: Process) -> None:
    """Let it open nothing more."""
    used = max(int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir())
    hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used + 1, hard))


FAULTS: dict[str, Callable[[Process], None]] = {
    "kill": kill,
    "stop": stop,
    "pause": pause,
    "full disk": full_disk,
    "no descriptors": no_descriptors,
}


@dataclass(frozen=True)
class Round:
    """One job with its fault and its outcome.

    Attributes:
        outcome: success, error, killed (the job's own process), early (success before the fault), or wrong.
        text: the error, or what is wrong.
        seconds: from the fault, or without one from the start, to the end.
    """

    stage: str
    point: str
    fault: str
    outcome: str
    text: str
    seconds: float


class Speaking:
    """A process whose output is collected from pipes: to files it could not speak of a full disk."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.out = self.err = ""
        self._threads = [
            threading.Thread(target=self._collect, args=(name,), daemon=True) for name in ("out", "err")
        ]
        for thread in self._threads:
            thread.start()

    def _collect(self, name: str) -> None:
        with getattr(self.process, f"std{name}") as stream:
            for line in stream:
                setattr(self, name, getattr(self, name) + line)

    def finish(self) -> None:
        """Wait until what it has printed has been read."""
        for thread in self._threads:
            thread.join(PAUSE_S)


class Job:
    """A running job with directories of its own."""

    def __init__(self, stage: Stage, directory: Path) -> None:
        self.stage, self._directory = stage, directory
        self._id = directory.name
        for name in ("tmp", "run", "state", "cache", "bin"):
            (directory / name).mkdir(mode=0o700)
        (directory / "bin" / "ssh").write_text(STAND_IN)
        (directory / "bin" / "ssh").chmod(0o755)
        self._environ = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith(("POLYXLA_", "XRT_"))
            },
            **stage.variables,
            MARK: self._id,
            "PATH": f"{directory}/bin:{os.environ['PATH']}",
            "TMPDIR": f"{directory}/tmp",
            "XDG_RUNTIME_DIR": f"{directory}/run",
            "XDG_STATE_HOME": f"{directory}/state",
            "XDG_CACHE_HOME": f"{directory}/cache",
            **{name: f"{value:g}" for name, value in LIMITS.items()},
        }
        self._pids: set[int] = set()
        # The kernel reuses process ids.
        self._shared_before = set(Path("/dev/shm").iterdir())
        self._service: Speaking | None = None
        self._relay: Speaking | None = None
        self._address = ""
        if stage.service:
            self._start_service(stage.service)
            if problem := self.service_problem():
                raise AssertionError(problem)
        self._main = self._start(stage.command)
        self.process = self._main.process

    def _start(self, command: Sequence[str]) -> Speaking:
        return Speaking([sys.executable, "-m", "polyxla", *command], self._environ)

    def _start_service(self, command: Sequence[str]) -> None:
        if command[0] == "worker":
            # Clients look for a worker's own token by its address, and these come by the link's.
            token = self._directory / "token"
            token.touch(mode=0o600)
            token.write_text(self._id * 2)
            self._environ["POLYXLA_XRT_TOKEN_FILE"] = str(token)
            command = [*command, "--token-file", str(token)]
        self._service = self._start(command)
        if self.stage.name == "warm":
            if self._service.process.wait(START_S * 2):
                raise AssertionError(self._service.err)
            return
        _wait(lambda: self._service and "}" in self._service.out, "the worker", START_S)
        self._address = json.loads(self._service.out.partition("}")[0] + "}")["address"]
        # A link between clients and worker that can be cut, and fall silent.
        self._relay = Speaking([sys.executable, __file__, "--relay", self._address], self._environ)
        _wait(lambda: self._relay and "\n" in self._relay.out, "the link", START_S)
        self._environ["XRT_TPU_CONFIG"] = f"tpu_worker;0;127.0.0.1:{int(self._relay.out)}"

    def processes(self) -> list[Process]:
        """Return the processes of the job that live."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                with contextlib.suppress(OSError, ValueError):
                    if f"{MARK}={self._id}\0" in (path / "environ").read_text(errors="replace"):
                        command = (path / "cmdline").read_text(errors="replace").replace("\0", " ")
                        state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
                        found.append(Process(int(path.name), int(parent), command, state))
        self._pids |= {process.pid for process in found}
        return [process for process in found if process.state not in "ZX"]

    def at(self, point: str) -> list[Process]:
        """Return the processes at a point."""
        return self.stage.points[point](self, self.processes())

    def output(self, *, is_over: bool = False) -> tuple[str, str]:
        """Return what the job has printed on both streams."""
        if is_over:
            self._main.finish()
        return self._main.out, self._main.err

    def service_problem(self) -> str | None:
        """Describe what is wrong with the service: it must answer, and serve nothing."""
        if not self.stage.service:
            return None
        ask = ["worker", "status", self._address] if self._address else ["warm", "status"]
        command = [sys.executable, "-m", "polyxla", *ask, "--json"]
        deadline = time.monotonic() + START_S
        while True:
            done = subprocess.run(
                command, env=self._environ, capture_output=True, text=True, timeout=START_S, check=False
            )
            if done.returncode == 0:
                document = json.loads(done.stdout)
                states = [document] if self._address else document["processes"]
                if states and not any(state.get("jobs") or state.get("jobs_running") for state in states):
                    return None
            if time.monotonic() > deadline:
                return f"the service is not well: {done.stdout}{done.stderr}"
            time.sleep(0.5)

    def end(self) -> list[str]:
        """End the service and the stopped processes; return what is left of the job, and remove it."""
        has_run = "STEP" in self.output()[0]
        for still in self.processes():
            if still.state in "Tt":
                os.kill(still.pid, signal.SIGCONT)
        if self.stage.name == "warm":
            subprocess.run(
                [sys.executable, "-m", "polyxla", "warm", "off"],
                env=self._environ,
                capture_output=True,
                check=False,
            )
        for helper in (self._relay, self._service):
            if helper:
                helper.process.terminate()
        with contextlib.suppress(AssertionError):
            _wait(lambda: not self.processes(), "the end of all processes", LEFT_S)
        left = [f"process {process.pid} ({process.command[:150]})" for process in self.processes()]
        for rest in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rest.pid, signal.SIGKILL)
        for speaking in (self._main, self._service, self._relay):
            if speaking:
                speaking.process.wait(LEFT_S)
        files = [path for path in (self._directory / "tmp").iterdir() if has_run or not _is_torchs(path)]
        left += [f"{path.name} in TMPDIR" for path in files]
        numbers = {str(pid) for pid in self._pids}
        left += [
            f"shared memory {path.name}"
            for path in set(Path("/dev/shm").iterdir()) - self._shared_before
            if numbers & set(re.findall(r"\d+", path.name))
        ]
        return left


def _is_torchs(path: Path) -> bool:
    """Return whether torch made this directory, which a program leaves if it is killed before its launch."""
    return path.is_dir() and all(file.name.startswith("_remote_module_") for file in path.glob("*.py"))


def _wait(condition: Callable[[], Any], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.05)


def run(stage: Stage, point: str, fault: str, after_s: float = 0.0, *, while_running: bool = False) -> Round:
    """Run a job, with a fault at a point; without one if the fault is ``none``.

    Args:
        stage: the kind of job.
        point: the point; of several processes there, the fault is that of any.
        fault: its name.
        after_s: when, in seconds after the start, or after the first step.
        while_running: whether to wait for the first step.
    """
    with tempfile.TemporaryDirectory(prefix="polyxla-faults-") as directory:
        job = Job(stage, Path(directory))
        begin = time.monotonic()
        is_running, is_struck, is_root = False, False, False
        try:
            while fault != "none" and job.process.poll() is None and time.monotonic() < begin + DEADLINE_S:
                if not is_running and while_running and "STEP" in job.output()[0]:
                    is_running, after_s = True, time.monotonic() - begin + after_s
                is_due = time.monotonic() > begin + after_s and is_running == while_running
                if is_due and (found := job.at(point)):
                    victim = random.choice(found)
                    begin, is_root = time.monotonic(), victim.pid == job.process.pid
                    # It may be ending just now.
                    with contextlib.suppress(OSError, ValueError):
                        FAULTS[fault](victim)
                        is_struck = True
                    break
                time.sleep(0.05)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(max(1.0, begin + DEADLINE_S - time.monotonic()))
            took_s = time.monotonic() - begin
            outcome, text = judge(job, is_struck=is_struck, is_root=is_root, fault=fault)
            # A supervisor replaces its worker; other faults of a service are not repaired.
            is_harmed = point in SERVICES and (point, fault) != ("worker", "kill")
            if outcome != "wrong" and not (is_struck and is_harmed) and (problem := job.service_problem()):
                outcome, text = "wrong", problem
        finally:
            left = job.end()
        if left and not (is_struck and point == "warm process"):
            outcome, text = "wrong", f"left behind ({text}): {'; '.join(left)}"
        return Round(stage.name, point, fault, outcome, text, round(took_s, 1))


def judge(job: Job, *, is_struck: bool, is_root: bool, fault: str) -> tuple[str, str]:
    """Return the outcome of a job and its text."""
    code, (out, err) = job.process.poll(), job.output(is_over=True)
    last = " / ".join(err.strip().splitlines()[-3:])
    if code is None:
        return "wrong", f"no outcome within {DEADLINE_S:g} s: {last}"
    if code == 0:
        is_whole = all(result in out for result in job.stage.results)
        how = "success" if is_struck or fault == "none" else "early"
        return (how, "") if is_whole else ("wrong", "exit code 0 without a result")
    # A program in a fork of a warm process was killed: its client ends as it did.
    is_own = is_root or job.stage.name == "warm"
    if is_struck and fault == "kill" and is_own and code == -signal.SIGKILL:
        return "killed", ""
    if is_struck and code > 0 and (found := NAMED.findall(err)):
        return "error", found[-1][:300]
    return "wrong", f"exit code {code}, {'' if is_struck else 'without a fault, '}no named error: {last}"


def rounds(minutes: float, seed: int, only: Sequence[str]) -> Iterator[Round]:
    """Run jobs until the time is over, some of them without a fault."""
    rng, end_s = random.Random(seed), time.monotonic() + 60 * minutes
    stages = [stage for stage in STAGES if not only or stage.name in only]
    while time.monotonic() < end_s:
        stage = rng.choice(stages)
        point = rng.choice(list(stage.points))
        faults = [name for name in FAULTS if name != "stop" or point in stage.watched]
        fault, while_running, part = rng.choice(faults), rng.random() < RUNNING, rng.random()
        if rng.random() < UNHARMED:
            yield run(stage, "-", "none")
        else:
            latest_s = RUN_S if while_running else STARTING_S
            yield run(stage, point, fault, latest_s * part, while_running=while_running)


def table(found: Sequence[Round]) -> str:
    """Return the sums, with a line for each point and fault."""
    rows: dict[tuple[str, str, str], list[Round]] = defaultdict(list)
    for result in found:
        rows[result.stage, result.point, result.fault].append(result)
    lines = [f"{'job':<14}{'point':<23}{'fault':<16}{'times':>6}  {'outcomes':<34}{'longest':>9}"]
    for (stage, point, fault), same in sorted(rows.items()):
        counts = Counter(result.outcome for result in same)
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        longest = max(result.seconds for result in same)
        lines.append(f"{stage:<14}{point:<23}{fault:<16}{len(same):>6}  {outcomes:<34}{longest:>7.1f} s")
    wrong = [result for result in found if result.outcome == "wrong"]
    lines.append(f"{len(found)} jobs, {len(wrong)} with a wrong outcome")
    return "\n".join(
        [
            *lines,
            *(f"wrong: {result.stage}, {result.point}, {result.fault}: {result.text}" for result in wrong),
        ]
    )


def relay(address: str) -> None:
    """Connect each client with a worker; print the port."""
    import asyncio

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition(":")
        try:
            far = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, far[1]), pump(far[0], writer))

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    asyncio.run(main())


def main() -> int:
    """Run, and print the table; exit code 1 if an outcome was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", action="append", default=[], choices=[stage.name for stage in STAGES])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--relay")
    options = parser.parse_args()
    if options.relay:
        relay(options.relay)
        return 0
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    found = []
    for result in rounds(options.minutes, seed, options.only):
        found.append(result)
        print(
            f"{result.stage}, {result.point}, {result.fault}: {result.outcome} after {result.seconds:g} s. "
            f"{result.text}",
            file=sys.stderr,
            flush=True,
        )
    if options.json:
        print(json.dumps({"seed": seed, "rounds": [asdict(entry) for entry in found]}, indent=2))
    else:
        print(table(found))
    return int(any(entry.outcome == "wrong" for entry in found))


if __name__ == "__main__":
    sys.exit(main())
