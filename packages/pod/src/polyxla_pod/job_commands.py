"""``polyxla pod ps``, ``logs`` and ``kill``: the jobs that were started on this machine."""

from __future__ import annotations

import json
import shlex
import time
from typing import Annotated, Any

import typer

from polyxla.plugin import JsonFlag, env, plain_errors, print_json, print_table, say

JobArgument = Annotated[str | None, typer.Argument(metavar="[JOB]", help="Its id or the beginning of it.")]


def ps(job: JobArgument = None, as_json: JsonFlag = False) -> None:
    """List the jobs that were started on this machine, or the hosts of one."""
    from polyxla_pod.launcher import records

    with plain_errors(as_json):
        directory = records.root(env.snapshot())
        found = [records.find(directory, job)] if job else records.read_all(directory)
        if as_json:
            print_json({"jobs": found})
        elif job:
            names = ["name", "state", "step", "loss", "steps_per_s", "last_line"]
            hosts = enumerate(found[0]["hosts"])
            print_table(["", *names], [[f"w{n}", *(_cell(one[name]) for name in names)] for n, one in hosts])
        else:
            print_table(["job", "state", "started", "hosts", "command"], [_job_row(one) for one in found])


def _job_row(job: dict[str, Any]) -> list[Any]:
    return [job["id"], _state(job), _clock(job["started"]), len(job["hosts"]), shlex.join(job["command"])]


def _state(job: dict[str, Any]) -> str:
    if job["running"]:
        return "running"
    return f"exit code {job['exit_code']}" if "exit_code" in job else "launcher was killed"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def logs(
    job: JobArgument = None,
    only: Annotated[int | None, typer.Option("--host", metavar="N", help="Only this host's lines.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more while the job runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document per line.")] = False,
) -> None:
    """Print the output of a job that was started on this machine; by default of the newest."""
    from polyxla_pod.launcher import records

    with plain_errors(as_json):
        directory = records.root(env.snapshot())
        for line in records.log_lines(directory, records.find(directory, job), only, follow=follow):
            one = {"time": line.since_s, "hosts": line.hosts, "stream": line.stream, "text": line.text}
            typer.echo(json.dumps(one) if as_json else str(line))


def kill(job: Annotated[str, typer.Argument(metavar="JOB")], as_json: JsonFlag = False) -> None:
    """End a job that was started on this machine, on all of its hosts."""
    from polyxla_pod.launcher import records

    with plain_errors(as_json):
        directory = records.root(env.snapshot())
        found = records.find(directory, job)
        has_ended = records.end(directory, found)
        if as_json:
            print_json({"job": found["id"], "ended": has_ended})
        if not has_ended:
            say(f"error: job {found['id']} has not ended; process {found['pid']} is its launcher")
            raise typer.Exit(1)
