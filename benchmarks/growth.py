"""How large an emulated slice can grow on this machine: seconds and memory to the first all-reduce.

    nox -s bench -- growth [replicas] [spmd] [CHIPS]... [--limit SECONDS] [--json]

Each size is a v5e of so many chips. As replicas, one launch starts a process for each chip; as SPMD, each
host has a program, and four chips (eight on a v5e-8). The time is from the start of the first command until
the last process has the sum. The memory is what all processes then have: private pages, and their share of
those that several have. Larger sizes follow smaller ones, until one fails. The programs of the hosts are
forks of one process that has imported torch_xla, so that they share what they import, as replicas do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import JSON, do

SIZES = (8, 16, 32, 64, 128, 256)
KINDS = ("replicas", "spmd")
LIMIT, LIMIT_S = "--limit", 600.0
"""The option for the longest wait for the sums of one size, and its default in seconds."""
MARK = "GROWTH_BENCHMARK"
"""A variable by which the processes of a measurement are found: some have left its session."""
DONE = "SUMMED"
GRACE_S = 10.0
"""Time for the processes to end after SIGTERM, in seconds."""


def replicas() -> None:
    import polyxla

    polyxla.launch(_in_replica)


def _in_replica(replica: Any) -> None:
    import torch

    found = replica.all_reduce(torch.ones(2, device=replica.device))
    _say(float(found[0]), replica.world_size)


def spmd(hosts: int) -> None:
    given = dict(os.environ)
    # First, because it imports the framework module. The others are what each host would import.
    import torch_xla
    import torch_xla.distributed.spmd.xla_sharding  # noqa: F401

    import polyxla_bridge.engine.jax_engine  # noqa: F401
    from polyxla_pjrt import framework

    for host in range(hosts):
        if os.fork() == 0:
            # The import has prepared this process for one host; each fork is another.
            os.environ.clear()
            os.environ.update(given, POLYXLA_EMULATE_HOST=str(host))
            framework.apply_environment()
            _on_host()
    for _ in range(hosts):
        if code := os.waitstatus_to_exitcode(os.wait()[1]):
            raise SystemExit(code)


def _on_host() -> None:
    import numpy as np
    import torch
    import torch_xla.distributed.spmd.xla_sharding as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    count = xr.global_runtime_device_count()
    ones = torch.ones(count, 2).to("xla")
    xs.mark_sharding(ones, xs.Mesh(np.arange(count), (count,), ("chips",)), ("chips", None))
    _say(float(ones.sum()) / 2, count)


def _say(total: float, chips: int) -> None:
    if total != chips:
        raise SystemExit(f"the sum over {chips} chips is {total}")
    print(DONE + "\n", end="", flush=True)
    # The processes stay until their memory has been measured.
    time.sleep(2 * LIMIT_S)


def measure(kind: str, chips: int, limit_s: float) -> dict[str, Any]:
    """Start a slice; return the row of the table."""
    from polyxla.plugin import AcceleratorType

    hosts = AcceleratorType.parse(f"v5e-{chips}", "benchmark").hosts
    wanted = chips if kind == "replicas" else hosts
    token = f"{os.getpid()}-{kind}-{chips}"
    environ = {**os.environ, "POLYXLA_EMULATE": f"v5e-{chips}", MARK: token}
    reached = threading.Semaphore(0)
    started = time.perf_counter()
    with _ended(token):
        program = subprocess.Popen(
            do(globals()[kind], *([hosts] if kind == "spmd" else [])),
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=_count, args=(program, reached), daemon=True).start()
        said = _Errors(program)
        failed = ""
        for _ in range(wanted):
            while not failed and not reached.acquire(timeout=0.5):
                failed = _failure(program, said, time.perf_counter() - started > limit_s, limit_s)
            if failed:
                break
        seconds = time.perf_counter() - started
        memory = sum(map(_proportional_bytes, _processes(token)))
    result = {"kind": kind, "chips": chips, "processes": wanted, "seconds": round(seconds, 1)}
    return {**result, "gib": round(memory / (1 << 30), 2), "failed": failed}


def _count(program: subprocess.Popen[str], reached: threading.Semaphore) -> None:
    assert program.stdout is not None
    for line in program.stdout:
        if line.strip() == DONE:
            reached.release()


class _Errors:
    """What a program writes to standard error, read so that it never waits for the reader."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._program = program
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._program.stderr is not None
        self.lines.extend(self._program.stderr)


def _failure(program: subprocess.Popen[str], said: _Errors, is_late: bool, limit_s: float) -> str:
    if program.poll() is not None:
        last = next((line for line in reversed(said.lines) if line.strip()), "no output")
        return f"the program ended with {program.returncode}: {last.strip()}"
    return f"not within {limit_s:g} s" if is_late else ""


@contextlib.contextmanager
def _ended(token: str) -> Iterator[None]:
    """End all processes of a measurement after the context."""
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in _processes(token):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + GRACE_S
            while _processes(token) and time.monotonic() < deadline:
                time.sleep(0.2)


def _processes(token: str) -> list[int]:
    mark = f"\0{MARK}={token}\0".encode()
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal() and int(directory.name) != os.getpid():
            # A process may be another user's, or end meanwhile, and then it has no environment.
            with contextlib.suppress(OSError):
                if mark in b"\0" + (directory / "environ").read_bytes():
                    found.append(int(directory.name))
    return found


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def main(arguments: list[str]) -> None:
    """Measure what the command line names, and print a row for each size."""
    if arguments[:1] == ["--do"]:
        name, *values = json.loads(arguments[1])
        globals()[name](*values)
        return
    limit_s = LIMIT_S
    if LIMIT in arguments:
        place = arguments.index(LIMIT)
        limit_s = float(arguments[place + 1])
        arguments = arguments[:place] + arguments[place + 2 :]
    as_json = JSON in arguments
    kinds = [kind for kind in KINDS if kind in arguments] or KINDS
    sizes = [int(argument) for argument in arguments if argument.isdecimal()] or SIZES
    if not as_json:
        print(f"{'':<10} {'chips':>5} {'processes':>9} {'seconds':>8} {'GiB':>6}")
    for kind in kinds:
        for chips in sizes:
            row = measure(kind, chips, limit_s)
            if as_json:
                print(json.dumps({"benchmark": "growth", **row}), flush=True)
            else:
                numbers = f"{row['processes']:>9} {row['seconds']:>8.1f} {row['gib']:>6.2f}"
                print(f"{kind:<10} {chips:>5} {numbers}  {row['failed']}".rstrip(), flush=True)
            if row["failed"]:
                break


if __name__ == "__main__":
    main(sys.argv[1:])
