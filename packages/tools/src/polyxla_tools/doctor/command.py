"""``polyxla doctor``: whether this machine can train, and what to do if it cannot."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from polyxla import UsageError
from polyxla.plugin import JsonFlag, RuntimeOption, Setting, env, plain_errors, print_json, say

TIMEOUT_S = 120.0
"""Longest time for the trial, in seconds."""


def doctor(
    runtime: RuntimeOption = None,
    trial: Annotated[
        bool, typer.Option("--trial/--no-trial", help="Run an all-reduce on two replicas, or on the TPU.")
    ] = True,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Longest time for the trial.")
    ] = TIMEOUT_S,
    loader_workers: Annotated[
        int, typer.Option(metavar="N", min=0, help="Workers of each replica's DataLoader, for the memory.")
    ] = 0,
    paste: Annotated[
        bool, typer.Option("--paste", help="Print a block to paste into an issue, instead of a table.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Examine this machine: versions, devices, variables, memory, and a trial.

    Exit code 1: there is a problem.
    """
    # Imported here, because every command of polyxla loads this module.
    from polyxla_tools.doctor import report
    from polyxla_tools.doctor.examination import attempt, examine, gather
    from polyxla_tools.doctor.findings import Status

    # SystemExit unwinds the trial's context managers, as KeyboardInterrupt does, so no process is left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with plain_errors(as_json):
        _check_format(paste=paste, as_json=as_json)
        environ = env.snapshot()
        asked = None if runtime is None else Setting(runtime, f"--runtime {runtime}")
        facts = gather(environ, env.from_environ(environ, runtime=asked))
        if trial and sys.stderr.isatty():
            say(f"doctor: trying an all-reduce, for at most {timeout:g} s")
        outcome = attempt(facts, timeout) if trial else None
        findings = examine(facts, outcome, loader_workers)
        if as_json:
            print_json(report.as_json(facts, outcome, findings))
        elif paste:
            typer.echo(report.as_block(facts, findings))
        else:
            report.print_findings(findings)
        raise typer.Exit(any(finding.status is Status.PROBLEM for finding in findings))


def _check_format(*, paste: bool, as_json: bool) -> None:
    if paste and as_json:
        raise UsageError(
            "one document at a time can be printed", where="--paste --json", fix="Leave one of them out."
        )
