"""``polyxla worker``: start a worker, print its status, drain it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from polyxla import UsageError
from polyxla.plugin import JsonFlag, plain_errors, print_json, printable, say, snapshot
from polyxla_xrt.config.addresses import DEFAULT_PORT, GRPC, join_address, read_address
from polyxla_xrt.config.variables import Variable
from polyxla_xrt.config.workers import read_workers

app = typer.Typer(
    help="Serve this machine's cores, or query a worker.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

AddressArgument = Annotated[str, typer.Argument(metavar="HOST:PORT", help="The worker's address.")]


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0 chooses a free port.")
    ] = f"127.0.0.1:{DEFAULT_PORT}",
    devices: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=4096, help="Number of cores; default: all, or 8 on the CPU."),
    ] = None,
    platform: Annotated[
        str, typer.Option(metavar="KIND", help="Kind of the cores: cpu, tpu, or plugin=PATH.")
    ] = "cpu",
    tpu_slice: Annotated[
        str,
        typer.Option(
            "--slice",
            metavar="WORKERS",
            help="The workers of all hosts of the TPU slice, as in XRT_TPU_CONFIG.",
        ),
    ] = "",
    plugin_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Option of the plugin's client.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that clients must send.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="File with this worker's certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="File with the certificate's key, PEM.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="File with the authority of the clients' certificates, PEM.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept every client that reaches the address.")
    ] = False,
    memory_per_job: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=0.001, max=1e6, help="Memory limit of a job's arrays and programs."),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=64, help="Number of jobs that may hold cores at once, each in a process."
        ),
    ] = 1,
    job_ports: Annotated[
        str, typer.Option(metavar="FIRST-LAST", help="Ports of these processes; default: any free ones.")
    ] = "",
    keep: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            max=31_536_000,
            help="How long to keep what a job has kept, after the job's end.",
        ),
    ] = None,
    metrics_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of the metrics for Prometheus.")
    ] = None,
    exit_when_idle: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.5, max=31_536_000, help="Exit after so long without a job."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log JSON lines.")] = False,
) -> None:
    """Start a worker that serves this machine's cores until Ctrl-C or SIGTERM."""
    if context.invoked_subcommand:
        return
    with plain_errors(as_json):
        from polyxla_xrt.server.worker import logs
        from polyxla_xrt.server.worker.platforms.choice import choose_platform
        from polyxla_xrt.server.worker.platforms.engines import Served
        from polyxla_xrt.server.worker.process import ServingOptions
        from polyxla_xrt.server.worker.security import Security
        from polyxla_xrt.server.worker.supervisor import supervise

        host, port = _address(address, "--address", may_be_any=True)
        address = join_address(host, port)
        if jobs > 1 and platform != "cpu":
            raise UsageError(
                f"--jobs {jobs} needs cores that several processes can open, unlike a plugin's devices",
                where=f"--platform {platform}",
                fix="Omit --jobs: each job then gets the devices when the one before it has ended.",
            )
        if metrics_address:
            metrics_address = join_address(*_address(metrics_address, "--metrics-address"))
        security = Security(token_file, tls_cert, tls_key, tls_client_ca, insecure)
        security.check(host)
        # The files are read once before the fork: a serving process that failed on them would be replaced
        # over and over.
        security = security.with_token()
        security.credentials()
        logs.start(as_json=as_json)
        environ = snapshot()
        workers = read_workers(Variable("--slice", tpu_slice)) if tpu_slice else ()
        library = choose_platform(platform, plugin_option or (), environ, workers)
        ports = _ports(job_ports, jobs) if job_ports else (0,)
        if library and library.members:
            library.members.check(port)
            security.as_client(environ)
        serving = ServingOptions(
            address,
            security,
            library=library,
            cores=devices,
            memory_limit_bytes=int(memory_per_job * 2**30) if memory_per_job else None,
            metrics_address=metrics_address,
            idle_exit_s=exit_when_idle,
            max_jobs=jobs,
            keep_s=keep,
            job_ports=ports,
        )

        def ready(where: str, served: Served) -> None:
            if as_json:
                print_json({"address": where, "devices": served.cores, "platform": served.platform})
            else:
                cores = f"{served.cores} {served.platform} core(s)"
                say(f"worker: serving {cores} at {where}; Ctrl-C stops it")

        raise typer.Exit(supervise(serving, environ, ready))


@app.command()
def status(address: AddressArgument, as_json: JsonFlag = False) -> None:
    """Print a worker's status and the jobs that hold its cores."""
    _query(address, "Status", as_json)


@app.command()
def drain(address: AddressArgument, as_json: JsonFlag = False) -> None:
    """Make a worker refuse new jobs and exit once its jobs have ended."""
    _query(address, "Drain", as_json)


def _query(address: str, call: Literal["Status", "Drain"], as_json: bool) -> None:
    with plain_errors(as_json):
        from polyxla_xrt.client.channel import ask

        reply = ask(join_address(*_address(address, address)), call, snapshot())
        if as_json:
            print_json(reply)
        else:
            jobs, kept = reply.pop("jobs"), reply.pop("kept")
            for name, value in reply.items():
                typer.echo(printable(f"{name.replace('_', ' '):12} {value}"))
            for job in jobs:
                typer.echo(printable(f"{'job':12} {_format(job)}"))
            if not jobs:
                typer.echo("job          none")
            for each in kept:
                typer.echo(printable(f"{'kept':12} {_format_kept(each)}"))


def _format(job: Mapping[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["since"]))
    who = f"{job['user']}@{job['host']} (pid {job['pid']}, {job['command']})"
    memory = f"{job['memory_bytes'] / 2**20:,.0f} MiB"
    return f"{who} since {since}: {job['cores']} core(s), {job['sessions']} process(es), {memory}"


def _format_kept(kept: Mapping[str, Any]) -> str:
    left = f", freed in {kept['left_s']:.0f} s" if "left_s" in kept else ""
    return f"{kept['name']} of {kept['user']}@{kept['host']}: {kept['bytes'] / 2**20:,.1f} MiB{left}"


def _ports(text: str, jobs: int) -> range:
    first, _, last = text.partition("-")
    is_range = first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16
    if jobs < 2 or not is_range or int(last) - int(first) + 1 < jobs:
        raise UsageError(
            f"{text!r} is no range of ports for {jobs} jobs with a process each"
            if jobs > 1
            else "a worker of one job serves it at its own port",
            where=f"--job-ports {text}",
            fix=f"Write the first and the last port, such as 8471-{8470 + max(2, jobs)}, and --jobs.",
        )
    return range(int(first), int(last) + 1)


def _address(text: str, where: str, *, may_be_any: bool = False) -> tuple[str, int]:
    host, _, port = text.removeprefix(GRPC).rpartition(":")
    # Port 0 means any free port, which `read_address` rejects.
    if may_be_any and host and port == "0":
        return host.strip("[]"), 0
    return read_address(Variable(where, text), text)
