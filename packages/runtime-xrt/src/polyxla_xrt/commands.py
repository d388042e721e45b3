"""``polyxla worker``: serve cores, look at a worker, drain one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from polyxla import UsageError
from polyxla.cli.app import JsonFlag, plain_errors, print_json
from polyxla.console import say
from polyxla.env import snapshot
from polyxla_xrt.config.addresses import DEFAULT_PORT, read_address
from polyxla_xrt.config.variables import Variable

app = typer.Typer(
    help="Serve this machine's cores to TPU-node clients, or look at such a worker.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

AddressArgument = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the worker listens.")]


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 for any that is free.")
    ] = f"127.0.0.1:{DEFAULT_PORT}",
    devices: Annotated[int, typer.Option(metavar="N", min=1, max=4096, help="How many cores.")] = 8,
    platform: Annotated[str, typer.Option(help="What the cores are: cpu.")] = "cpu",
    token_file: Annotated[Path | None, typer.Option(help="Holds the token that clients must bring.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="This worker's certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key, PEM.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Clients must have a certificate of this authority.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let anybody on the network in.")] = False,
    memory_per_job: Annotated[
        float | None, typer.Option(metavar="GIB", min=0.001, help="Most memory of a job's arrays.")
    ] = None,
    metrics_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where Prometheus may ask for metrics.")
    ] = None,
    exit_when_idle: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.5, help="End after so long without a job.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log JSON lines.")] = False,
) -> None:
    """Serve this machine's cores until a signal ends it."""
    if context.invoked_subcommand:
        return
    with plain_errors(as_json):
        from polyxla_xrt.server import logs
        from polyxla_xrt.server.worker.process import ServingOptions
        from polyxla_xrt.server.worker.security import Security
        from polyxla_xrt.server.worker.service import WorkerSettings
        from polyxla_xrt.server.worker.supervisor import supervise

        _check_platform(platform)
        host, _ = _address(address, "--address", may_be_any=True)
        if metrics_address:
            _address(metrics_address, "--metrics-address")
        security = Security(token_file, tls_cert, tls_key, tls_client_ca, insecure)
        security.check(host)
        # What is wrong with the files is said now, and not by a process that is replaced over and over.
        security.token()
        security.credentials()
        settings = WorkerSettings(devices, platform)
        if memory_per_job is not None:
            settings.memory_limit_bytes = int(memory_per_job * 2**30)
        logs.start(as_json=as_json)
        serving = ServingOptions(address, settings, security, metrics_address, exit_when_idle)

        def ready(where: str) -> None:
            if as_json:
                print_json({"address": where, "devices": devices, "platform": platform})
            else:
                say(f"worker: {devices} {platform} core(s) at {where}; Ctrl-C ends it")

        raise typer.Exit(supervise(serving, snapshot(), ready))


@app.command()
def status(address: AddressArgument, as_json: JsonFlag = False) -> None:
    """Say what a worker serves, and who has its cores."""
    _ask(address, "Status", as_json)


@app.command()
def drain(address: AddressArgument, as_json: JsonFlag = False) -> None:
    """Let a worker finish the job that runs, take no other, and end."""
    _ask(address, "Drain", as_json)


def _ask(address: str, call: Literal["Status", "Drain"], as_json: bool) -> None:
    with plain_errors(as_json):
        from polyxla_xrt.client.channel import ask

        _address(address, address)
        reply = ask(address, call, snapshot())
        if as_json:
            print_json(reply)
        else:
            for name, value in reply.items():
                typer.echo(f"{name.replace('_', ' '):12} {_spelt(name, value)}")


def _spelt(name: str, value: object) -> str:
    if name == "job" and isinstance(value, dict):
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value["since"]))
        return f"{value['user']}@{value['host']} (pid {value['pid']}, {value['command']}) since {since}"
    return "none" if value is None else str(value)


def _address(text: str, where: str, *, may_be_any: bool = False) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    # Any port that is free is no address to read.
    if may_be_any and host and port == "0":
        return host.strip("[]"), 0
    return read_address(Variable(where, text), text)


def _check_platform(platform: str) -> None:
    if platform != "cpu":
        raise UsageError(
            f"this version serves CPU cores only, not {platform!r}",
            where=f"--platform {platform}",
            fix="Write --platform cpu, or nothing.",
        )
