"""The ``polyxla`` command and its subcommands."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
import typer.core

import polyxla
from polyxla import env
from polyxla.cli.output import JsonFlag, RuntimeOption, described, plain_errors, print_json, print_table
from polyxla.console import drop_output, say
from polyxla.env import Setting
from polyxla.errors import PolyxlaError, UsageError, pip_install
from polyxla.launcher.launch import announce

DevicesOption = Annotated[
    str | None, typer.Option("--devices", metavar="D", help="Devices: auto, a count (8) or indices ([5]).")
]
PrecisionOption = Annotated[
    str | None, typer.Option("--precision", metavar="P", help="Precision policy, such as 32-true.")
]
WaitOption = Annotated[
    str | None,
    typer.Option("--wait", metavar="SECONDS", help="Longest wait for devices that another job is using."),
]

EmulateOption = Annotated[
    str | None, typer.Option("--emulate", metavar="TYPE", help="Emulate a TPU of this type, such as v5e-8.")
]
EMULATE = "POLYXLA_EMULATE"
"""The variable of ``polyxla.tpu`` that ``--emulate`` sets."""
OTHERS = {
    **dict.fromkeys(("--nproc-per-node", "--nproc_per_node"), ("torchrun", "--devices {}")),
    **dict.fromkeys(("--num-processes", "--num_processes"), ("Accelerate", "--devices {}")),
    **dict.fromkeys(("--mixed-precision", "--mixed_precision"), ("Accelerate", "--precision {}-mixed")),
    **dict.fromkeys(("--nnodes", "--node-rank", "--node_rank"), ("torchrun", None)),
    **dict.fromkeys(("--num-machines", "--num_machines", "--machine_rank"), ("Accelerate", None)),
}
"""Options of other launchers, each with the launcher and what to write here; None for several hosts.
Source: ``torchrun --help`` of torch 2.9, ``accelerate launch --help`` of Accelerate 1.15.
"""
EXAMPLES = """Examples:

\b
  polyxla run train.py --lr 0.1                    on what this machine has
  polyxla run --devices 4 train.py                 four replicas, by a launch in the script
  polyxla run --devices 4 --each train.py          the script itself in each of four
  polyxla run --emulate v5e-8 train.py             on an emulated TPU
  polyxla run --dry-run -m package.train           what would be chosen
"""

MEANT = {"launch": "run", "test": "doctor", "config": "env"}
"""The command that is meant, by the name that is tried. Source: the commands of Accelerate 1.15."""
PACKAGES = {
    **dict.fromkeys(("doctor", "fits", "warm"), "polyxla-tools"),
    **dict.fromkeys(("report", "consolidate", "check-replicas"), "polyxla-training"),
    "pod": "polyxla-pod",
    "worker": "polyxla-runtime-xrt",
}
"""The distribution of this project that brings a command."""


_AS_JSON = "polyxla.as_json"
_ParseError: Any = typer.BadParameter.__base__
"""Of typer's errors about command lines, it exports only the special ones."""


@contextlib.contextmanager
def _plain_usage_errors(as_json: bool) -> Iterator[None]:
    try:
        yield
    except _ParseError as error:
        # Without arguments, the help is the error's text.
        if error.message == error.ctx.get_help():
            raise
        path = error.ctx.command_path
        with plain_errors(as_json):
            raise UsageError(
                error.format_message().removesuffix("."),
                where=path,
                fix=f"`{path} --help` shows how it is used.",
            ) from None


class _Commands(typer.core.TyperGroup):
    """The commands. What is wrong in a command line is an error like any other: one line, and a document.

    The error about an unknown name says what is meant, or which package brings it.
    """

    def make_context(self, info_name: Any, args: list[str], *others: Any, **more: Any) -> Any:
        """Parse the options before the command."""
        # What follows -- is not polyxla's, nor is the output of a program that `polyxla run` starts.
        own = list(itertools.takewhile(lambda argument: argument != "--", args))
        as_json = "--json" in own and (own[0] != "run" or "--dry-run" in own)
        with _plain_usage_errors(as_json):
            context = super().make_context(info_name, args, *others, **more)
        context.meta[_AS_JSON] = as_json
        return context

    def invoke(self, ctx: Any) -> Any:
        """Parse the rest, and run the command."""
        with _plain_usage_errors(ctx.meta[_AS_JSON]):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name."""
        name = args[0]
        if self.get_command(ctx, name) is None and name in (*MEANT, *PACKAGES):
            with plain_errors(as_json=False):
                raise UsageError(f"there is no command {name}", fix=_instead(name))
        return super().resolve_command(ctx, args)


def _instead(name: str) -> str:
    if name in MEANT:
        return f"Did you mean polyxla {MEANT[name]}?"
    return f"Install the package that brings it: {pip_install(PACKAGES[name])}"


app = typer.Typer(
    name="polyxla",
    cls=_Commands,
    help="PyTorch training on TPUs with a runtime that is chosen when the script starts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Rich's help costs 0.2 s, more than the rest of `polyxla --help`.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line with the commands of every installed plugin."""
    from polyxla.plugin_manager import load_everything

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A command must not fail because a terminal cannot show an arrow, or the name of a file.
            stream.reconfigure(errors="backslashreplace")
    try:
        # Runtimes that are not chosen may add commands as well, so everything is loaded.
        plugins = load_everything().hook.polyxla_add_commands.get_hookimpls()
    except PolyxlaError as error:
        plugins = []
        say(f"the commands of plugins are left out: {error}")
    for plugin in reversed(plugins):
        try:
            plugin.function(app=app)
        except Exception as error:
            # A plugin may raise anything. The commands of the others must still run: `polyxla doctor` and
            # `polyxla runtimes` report what is wrong.
            say(f"the commands of {plugin.plugin_name} are left out: {type(error).__name__}: {error}")
    try:
        app()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        say(f"error: the output cannot be written ({error.strerror})")
        drop_output()
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"polyxla {polyxla.__version__}")
        raise typer.Exit


@app.command()
def runtimes(runtime: RuntimeOption = None, as_json: JsonFlag = False) -> None:
    """List the runtimes, and explain the choice."""
    from polyxla.plugin_manager import plugin_problems
    from polyxla.selection import discover_all, select

    environ = env.snapshot()
    settings = env.from_environ(environ, runtime=_flag("--runtime", runtime))
    rows = [
        {
            "name": candidate.name,
            "package": candidate.entry.distribution,
            "version": candidate.entry.version,
            "available": candidate.why_not is None,
            "asked_for_by": candidate.discovery.reason if candidate.discovery and candidate.claim else None,
            "kind": candidate.discovery.kind if candidate.discovery else None,
            "devices": len(candidate.discovery.devices) if candidate.discovery else 0,
            "why_not": candidate.why_not,
        }
        for candidate in discover_all(environ)
    ]
    chosen: dict[str, Any] = {"chosen": None, "reason": None, "warnings": []}
    failure: PolyxlaError | None = None
    try:
        selection = select(environ, settings.runtime)
        chosen |= {"chosen": selection.runtime, "reason": selection.reason}
        chosen["warnings"] = list(selection.warnings)
    except PolyxlaError as error:
        # Kept, not raised: this command explains why nothing can be chosen, so it prints the table first.
        failure = error
    chosen["warnings"] += plugin_problems()
    if as_json:
        print_json({**chosen, **described(failure), "runtimes": rows})
    else:
        _show_runtimes(chosen, rows)
    if failure:
        say(f"error: {failure}")
        raise typer.Exit(failure.exit_code)


def _show_runtimes(chosen: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    print_table(
        ["", "runtime", "can run here", "devices", "asked for by"],
        [
            [
                "→" if row["name"] == chosen["chosen"] else "",
                row["name"],
                "yes" if row["available"] else f"no: {row['why_not']}",
                f"{row['devices']} {row['kind']}" if row["devices"] else "",
                row["asked_for_by"] or "",
            ]
            for row in rows
        ],
    )
    for warning in chosen["warnings"]:
        say(warning)
    if chosen["chosen"]:
        typer.echo(f"chosen: {chosen['chosen']} ({chosen['reason']})")


@app.command()
def devices(runtime: RuntimeOption = None, as_json: JsonFlag = False) -> None:
    """List the devices of the chosen runtime."""
    from polyxla.selection import select

    with plain_errors(as_json):
        environ = env.snapshot()
        settings = env.from_environ(environ, runtime=_flag("--runtime", runtime))
        selection = select(environ, settings.runtime)
        found = selection.discovery
        rows = [[device.index, device.kind, device.name, device.host_index] for device in found.devices]
        names = ["index", "kind", "name", "host_index"]
        if as_json:
            why = {"runtime": selection.runtime, "reason": selection.reason}
            hosts = {"topology": found.topology, "host_count": found.host_count}
            print_json({**why, **hosts, "devices": [dict(zip(names, row, strict=True)) for row in rows]})
            return
        announce(selection)
        print_table(names, rows)
        topology = f"topology {found.topology}, {found.host_count} host(s)" if found.topology else None
        typer.echo(f"runtime {selection.runtime}" + (f", {topology}" if topology else ""))


@app.command("env")
def environment(runtime: RuntimeOption = None, as_json: JsonFlag = False) -> None:
    """Show the relevant variables with their values and origins."""
    from polyxla.cli.variables import variables

    with plain_errors(as_json):
        environ = env.snapshot()
        rows = variables(environ, env.from_environ(environ, runtime=_flag("--runtime", runtime)))
        if as_json:
            print_json({"variables": rows})
            return
        print_table(
            ["variable", "value", "origin", "read by"],
            [[row["name"], row["value"] or "", row["origin"], row["reader"]] for row in rows],
        )


class _RunCommand(typer.core.TyperCommand):
    """Like python, leaves all arguments after the script, or after ``-m MODULE``, to the program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert ``--`` before the program."""
        # click would take the program's options for its own, also those that polyxla has too.
        takes_value = {"--runtime", "--devices", "--precision", "--wait", "--emulate"}
        index = 0
        while index < len(args) and args[index].startswith("-") and args[index] not in ("-m", "--"):
            with plain_errors(as_json=False):
                _refuse_others(args[index:])
            index += 2 if args[index] in takes_value else 1
        if index < len(args) and args[index] != "--":
            args = [*args[:index], "--", *args[index:]]
        return super().parse_args(ctx, args)


def _refuse_others(args: list[str]) -> None:
    """Refuse an option of another launcher, and say what to write."""
    name, _, value = args[0].partition("=")
    if name not in OTHERS:
        return
    launcher, here = OTHERS[name]
    # Both spellings, --option=value and --option value, are answered with the user's own number.
    given = value or (args[1] if len(args) > 1 else "")
    fix = "For several hosts, write polyxla pod." if here is None else f"Write {here.format(given)}."
    if here and here.startswith("--devices"):
        fix += " Add --each if the script launches nothing itself."
    raise UsageError(f"{name} is an option of {launcher}", where="polyxla run", fix=fix)


@app.command(cls=_RunCommand, epilog=EXAMPLES)
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="(SCRIPT | -m MODULE) [ARGS]...", show_default=False)
    ],
    runtime: RuntimeOption = None,
    devices: DevicesOption = None,
    precision: PrecisionOption = None,
    wait: WaitOption = None,
    emulate: EmulateOption = None,
    each: Annotated[bool, typer.Option("--each", help="Run the program once in every replica.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the variables and the command, and exit.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the choice as JSON; without --dry-run, on standard error.")
    ] = False,
) -> None:
    """Run an unmodified torch_xla script on the chosen runtime.

    The script receives the choice in its environment. Its output, signals and exit code are passed through.
    """
    from polyxla.cli.run import make_run_plan, replace_process

    with plain_errors(as_json and dry_run):
        environ = env.snapshot() | ({EMULATE: emulate} if emulate else {})
        settings = env.from_environ(
            environ,
            runtime=_flag("--runtime", runtime),
            devices=_flag("--devices", devices),
            precision=_flag("--precision", precision),
            wait_s=_flag("--wait", wait),
        )
        try:
            plan = make_run_plan(environ, settings, command, each)
        except UsageError as error:
            # The user wrote the option; the variable is only how the option travels.
            if emulate and error.where == f"{EMULATE}={emulate}":
                error.where = f"--emulate {emulate}"
            raise
        if emulate:
            # The program's process has no options, only its environment.
            plan.variables[EMULATE] = emulate
    if dry_run:
        lines = [
            *(f"{name}={value}" for name, value in plan.shown_variables().items()),
            " ".join(plan.command),
        ]
        print_json(plan.as_json()) if as_json else typer.echo("\n".join(lines))
        return
    # Standard output belongs to the program.
    if as_json:
        print(json.dumps(plan.as_json()), file=sys.stderr)
    else:
        announce(plan.selection)
    if plan.each:
        from polyxla.cli.run import run_each

        run_each(plan, environ)
    replace_process(plan, environ)


def _flag(name: str, value: str | None) -> Setting | None:
    return None if value is None else Setting(value, f"{name} {value}")
