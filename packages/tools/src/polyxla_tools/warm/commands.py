"""``polyxla warm``: start, show and end the warm processes of this interpreter."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from polyxla import UsageError
from polyxla.plugin import (
    JsonFlag,
    RuntimeOption,
    Setting,
    announce,
    child_environment,
    env,
    load_plugins,
    plain_errors,
    print_json,
    print_table,
    say,
    select,
    select_devices,
)

IDLE_MIN = 30.0
"""Time without a running job after which a warm process ends, in minutes."""

app = typer.Typer(help="A prepared process from which launches start at once.", no_args_is_help=True)


@app.command()
def on(
    runtime: RuntimeOption = None,
    idle: Annotated[
        float, typer.Option(metavar="MINUTES", min=0.01, help="End after this time without a job.")
    ] = IDLE_MIN,
    as_json: JsonFlag = False,
) -> None:
    """Prepare a process for this environment, unless there is one."""
    from polyxla_tools.warm.client import misfits
    from polyxla_tools.warm.preparation import Options, start

    with plain_errors(as_json):
        environ = env.snapshot()
        runtime, prepared, modules = _choose(environ, runtime)
        # One process that fits is enough; others may be prepared for other variables.
        if None in misfits(prepared, modules):
            line = "warm: a process for this environment is ready already"
            _print(line, {"runtime": runtime, "started": False}, as_json)
            return
        started = time.monotonic()
        pid = start(Options(runtime, modules, idle * 60), prepared)
        took_s = time.monotonic() - started
        line = f"warm: process {pid} is ready ({took_s:.1f} s, runtime {runtime})"
        _print(line, {"runtime": runtime, "started": True, "pid": pid, "start_s": took_s}, as_json)


@app.command()
def off(as_json: JsonFlag = False) -> None:
    """End the warm processes; each waits for its running jobs."""
    from polyxla_tools.warm.client import ask_all

    with plain_errors(as_json):
        answers = ask_all("off")
    lines = [
        f"warm: {answer['problem']}"
        if "problem" in answer
        else f"warm: process {answer['pid']} ends{_after_jobs(answer['jobs'])}"
        for answer in answers
    ]
    _print("\n".join(lines) or "warm: there is no warm process", {"processes": answers}, as_json)
    # A process that does not answer still runs, which a script must not take for success.
    if any("problem" in answer for answer in answers):
        raise typer.Exit(1)


def _after_jobs(running: int) -> str:
    return f" after its {running} running job(s)" if running else ""


def _print(line: str, document: Any, as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        typer.echo(line)


@app.command()
def status(as_json: JsonFlag = False) -> None:
    """Show the warm processes."""
    from polyxla_tools.warm.client import ask_all

    with plain_errors(as_json):
        answers = ask_all("status")
    if as_json:
        print_json({"processes": answers})
    elif not answers:
        typer.echo("warm: there is no warm process; `polyxla warm on` prepares one")
    else:
        names = ["pid", "age", "memory", "runtime", "jobs served", "running", "stale"]
        print_table(names, [_row(answer) for answer in answers if "problem" not in answer])
        for answer in answers:
            if "problem" in answer:
                say(f"warm: {answer['problem']}")


def _row(process: dict[str, Any]) -> list[Any]:
    age, memory = f"{process['age_s']:.0f} s", f"{process['memory_bytes'] / 2**20:,.0f} MiB"
    served, running = process["jobs_served"], process["jobs_running"]
    return [process["pid"], age, memory, process["runtime"], served, running, process["stale"] or "no"]


def _choose(environ: dict[str, str], runtime: str | None) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Return the runtime that a launch would choose, the environment of its programs, and its modules."""
    asked = None if runtime is None else Setting(runtime, f"--runtime {runtime}")
    settings = env.from_environ(environ, runtime=asked)
    selection = select(environ, settings.runtime)
    announce(selection)
    plugins = load_plugins(selection.runtime)
    devices = select_devices(settings.devices, selection)
    prepared = environ | child_environment(plugins, environ, selection, devices)
    modules = plugins.hook.polyxla_preload(environ=prepared)
    if not modules:
        raise UsageError(
            f"runtime {selection.runtime!r} has no process that could be prepared",
            # Nobody has set a runtime that was chosen because it runs anywhere.
            where=None if selection.implicit else selection.reason,
            fix="Leave it to start cold: an open TPU does not survive a fork.",
        )
    return selection.runtime, prepared, tuple(modules)
