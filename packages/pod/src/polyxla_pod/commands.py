"""``polyxla pod``: run a command on all hosts, list and end jobs, or print how Kubernetes would run it."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from polyxla import UsageError
from polyxla.plugin import JsonFlag, RuntimeOption, env, plain_errors, print_json, print_table, say
from polyxla_pod.job import CONNECT_S, GRACE_S, LOST_AFTER_S, PodJob
from polyxla_pod.tpu_nodes import WORKER_PORT
from polyxla_pod.transports import Target, Transport

app = typer.Typer(help="Run a command on all hosts of a TPU.", no_args_is_help=True, rich_markup_mode=None)

JobArgument = Annotated[str | None, typer.Argument(metavar="[JOB]", help="Its id or the beginning of it.")]


@app.command()
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND [ARGS]...", show_default=False)],
    hosts: Annotated[str, typer.Option(metavar="A,B", help="Hosts, as names for ssh.")] = "",
    tpu: Annotated[str | None, typer.Option(metavar="NAME", help="Name of a TPU VM, for gcloud.")] = None,
    zone: Annotated[str | None, typer.Option(metavar="ZONE", help="Zone of the TPU VM.")] = None,
    project: Annotated[str | None, typer.Option(metavar="ID", help="Project of the TPU VM.")] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Transport; default: ssh, or gcloud with --tpu.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="The same as --engine ray.")] = False,
    engine_option: Annotated[
        list[str], typer.Option(metavar="TEXT", help="Argument for the transport's program; repeatable.")
    ] = [],  # noqa: B006  typer reads the default, and never changes it
    runtime: RuntimeOption = None,
    workers: Annotated[
        bool, typer.Option("--workers", help="For runtime xrt: start a worker on each host first.")
    ] = False,
    worker_port: Annotated[
        int, typer.Option(metavar="PORT", min=1, max=65535, help="Port of each host's worker.")
    ] = WORKER_PORT,
    variables: Annotated[
        list[str],
        typer.Option(
            "--env",
            metavar="K=V",
            help="Variable for the command; {host} in V is the host's number; repeatable.",
        ),
    ] = [],  # noqa: B006
    sync: Annotated[str | None, typer.Option(metavar="DIR", help="Local directory to copy first.")] = None,
    directory: Annotated[
        str | None, typer.Option(metavar="DIR", help="Working directory on the hosts.")
    ] = None,
    python: Annotated[
        str, typer.Option(metavar="PATH", help="Python on the hosts that has polyxla-pod installed.")
    ] = "python3",
    retry: Annotated[
        int, typer.Option(metavar="N", min=0, help="Restart up to N times after a failure.")
    ] = 0,
    connect_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Longest wait for a host's first answer.")
    ] = CONNECT_S,
    lost_after: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.5, help="Silence after which a host counts as lost.")
    ] = LOST_AFTER_S,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Time between SIGTERM and SIGKILL.")
    ] = GRACE_S,
    preflight: Annotated[
        bool, typer.Option("--preflight/--no-preflight", help="Compare the hosts before the start.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands of each host, and exit.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run one command on all hosts, and end it on all when it fails on one."""
    with plain_errors(as_json):
        target = Target(_names(hosts), tpu, zone, project, tuple(engine_option))
        # `--engine` wins, so that a plugin can use the options of another transport.
        usual = "ray" if ray else "gcloud" if tpu else "ssh"
        chosen = _find_transport(engine or usual, target)
        job = PodJob(
            command=tuple(command),
            hosts=chosen.hosts,
            addresses=chosen.addresses,
            environ=_variables(variables),
            runtime=runtime,
            directory=directory or (_synced(sync) if sync else None),
            sync=sync,
            python=python,
            retry=retry,
            connect_s=connect_timeout,
            lost_after_s=lost_after,
            grace_s=grace,
            preflight=preflight,
            starts_workers=workers,
            worker_port=worker_port,
        )
        if dry_run:
            _print_commands(job, chosen, as_json)
            return
        raise typer.Exit(_run(job, chosen, as_json))


def _run(job: PodJob, transport: Transport, as_json: bool) -> int:
    # Imported here, because the command line of every user loads this module.
    from polyxla_pod.launcher.history import JobLog, root
    from polyxla_pod.launcher.run import JobRunner
    from polyxla_pod.pipeline import HostState
    from polyxla_pod.screens import LiveScreen, PlainScreen

    states = [HostState(name) for name in job.hosts]
    # The log exists before anything starts, so that `polyxla pod kill` works at once.
    log = JobLog(root(env.snapshot()), {"command": list(job.command)}, states)
    # With standard output in a file or a pipe, control sequences of the table would end up there.
    is_live = sys.stdout.isatty() and sys.stderr.isatty() and not as_json
    screen = LiveScreen(states) if is_live else PlainScreen(errors_only=as_json)
    kept = "" if log.is_lost else f"; `polyxla pod logs {log.id}` prints its log"
    say(f"pod: job {log.id} on {len(job.hosts)} host(s){kept}")
    try:
        result = JobRunner(job, transport, states, screen, log).run()
    except UsageError as error:
        # A job that was refused is still a job in `polyxla pod ps`, with its reason.
        log.close(error.exit_code, [str(error)])
        raise
    finally:
        # This runs after a signal as well: the live table has hidden the terminal's cursor.
        screen.close()
    failures = [failure.text for failure in result.failures]
    log.close(result.exit_code, failures)
    if as_json:
        hosts = [state.as_json() for state in states]
        document = {"job": log.id, "exit_code": result.exit_code, "attempts": result.attempts}
        print_json({**document, "failures": failures, "hosts": hosts})
    return result.exit_code


def _find_transport(name: str, target: Target) -> Transport:
    from polyxla.plugin import load_everything

    # All plugins are loaded, because any of them may bring the transport.
    found: Transport | None = load_everything().hook.polyxla_pod(transport=name, target=target)
    if found is None:
        raise UsageError(
            f"no installed plugin has a transport called {name!r}",
            where=f"--engine {name}",
            fix="Write ssh or gcloud, or install the plugin that provides it.",
        )
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _variables(texts: list[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not equals:
            raise UsageError(
                f"{text!r} is not a variable with a value",
                where=f"--env {text}",
                fix="Write NAME=VALUE, such as --env XLA_FLAGS=--xla_dump_to=dump.",
            )
        found[name] = value
    return found


def _synced(directory: str) -> str:
    """Return where a copied directory is on the hosts: always the same, so that checkpoints are found."""
    return f"~/polyxla-pod/{Path(directory).resolve().name}"


def _print_commands(job: PodJob, transport: Transport, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "host": number,
                "name": name,
                "connect": transport.command(number, job.program),
                "directory": job.directory,
                "environment": job.environ_of(number),
                "worker": job.worker_command(number) if job.starts_workers else None,
                "command": list(job.command),
            }
            for number, name in enumerate(job.hosts)
        ]
        print_json({"hosts": rows})
        return
    where = f"in {job.directory}: " if job.directory else ""
    lines: list[str] = []
    for number in range(len(job.hosts)):
        lines.append(f"[w{number}] {shlex.join(transport.command(number, job.program))}")
        if job.starts_workers:
            lines.append(f"[w{number}]   first: {_with_variables(job, number, job.worker_command(number))}")
        lines.append(f"[w{number}]   {where}{_with_variables(job, number, job.command)}")
    typer.echo("\n".join(lines))


def _with_variables(job: PodJob, host: int, command: Sequence[str]) -> str:
    variables = [f"{name}={value}" for name, value in job.environ_of(host).items()]
    return shlex.join([*(["env", *variables] if variables else []), *command])


@app.command()
def manifest(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND [ARGS]...", show_default=False)],
    accelerator: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="The TPU's type, such as v5e-16 or 2xv5e-16.")
    ],
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Container image with polyxla and the command.")
    ],
    engine: Annotated[str, typer.Option(metavar="NAME", help="Kind of the manifest: jobset.")] = "jobset",
    name: Annotated[str, typer.Option(metavar="NAME", help="The JobSet's name.")] = "polyxla",
    namespace: Annotated[str | None, typer.Option(metavar="NAME", help="The JobSet's namespace.")] = None,
    runtime: RuntimeOption = None,
    variables: Annotated[
        list[str], typer.Option("--env", metavar="K=V", help="Variable for the command; repeatable.")
    ] = [],  # noqa: B006
    grace: Annotated[
        int, typer.Option(metavar="SECONDS", min=0, help="Time for checkpoints at SIGTERM.")
    ] = 120,
    retry: Annotated[
        int, typer.Option(metavar="N", min=0, help="Restart up to N times after a failure.")
    ] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Print a JobSet for GKE; `kubectl apply -f -` starts it."""
    from polyxla.plugin import AcceleratorType
    from polyxla_pod.manifest import ManifestOptions, as_yaml, jobset

    with plain_errors(as_json):
        if engine != "jobset":
            raise UsageError(
                f"there is no kind of manifest called {engine!r}",
                where=f"--engine {engine}",
                fix="Write jobset.",
            )
        slices, kind = AcceleratorType.parse_slices(accelerator, f"--type {accelerator}")
        options = ManifestOptions(name, namespace, _variables(variables), runtime, grace, retry, slices)
        made = jobset(kind, image, command, options)
        print_json(made) if as_json else typer.echo(as_yaml(made), nl=False)


@app.command()
def host() -> None:
    """Serve one connection on standard input and output; `polyxla pod run` starts this on each host."""
    from polyxla_pod.host.__main__ import main

    main()


@app.command()
def ps(job: JobArgument = None, as_json: JsonFlag = False) -> None:
    """List the jobs that were started on this machine, or the hosts of one."""
    from polyxla_pod.launcher import history

    with plain_errors(as_json):
        directory = history.root(env.snapshot())
        found = [history.find(directory, job)] if job else history.read_all(directory)
        if as_json:
            print_json({"jobs": found})
        elif job:
            names = ["name", "state", "step", "loss", "steps_per_s", "last_line"]
            hosts = enumerate(found[0]["hosts"])
            print_table(
                ["", *names], [[f"w{n}", *(_cell(host[name]) for name in names)] for n, host in hosts]
            )
        else:
            print_table(["job", "state", "started", "hosts", "command"], [_job_row(known) for known in found])


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


@app.command()
def logs(
    job: JobArgument = None,
    only: Annotated[int | None, typer.Option("--host", metavar="N", help="Only this host's lines.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more while the job runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document per line.")] = False,
) -> None:
    """Print the output of a job that was started on this machine; by default of the newest."""
    from polyxla_pod.launcher import history

    with plain_errors(as_json):
        directory = history.root(env.snapshot())
        for line in history.log_lines(directory, history.find(directory, job), only, follow=follow):
            document = {"time": line.since_s, "hosts": line.hosts, "stream": line.stream, "text": line.text}
            typer.echo(json.dumps(document) if as_json else str(line))


@app.command()
def kill(job: Annotated[str, typer.Argument(metavar="JOB")], as_json: JsonFlag = False) -> None:
    """End a job that was started on this machine, on all of its hosts."""
    from polyxla_pod.launcher import history

    with plain_errors(as_json):
        directory = history.root(env.snapshot())
        found = history.find(directory, job)
        has_ended = history.end(directory, found)
        if as_json:
            print_json({"job": found["id"], "ended": has_ended})
        if not has_ended:
            say(f"error: job {found['id']} has not ended; process {found['pid']} is its launcher")
            raise typer.Exit(1)
