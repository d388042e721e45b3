"""``polyxla run``: make and check every choice; then become the program, or run it in every replica."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from polyxla import env
from polyxla.cli import script
from polyxla.cli.variables import shown
from polyxla.console import end_interrupted
from polyxla.contracts.job import Job, ReplicaResult
from polyxla.env import LaunchSettings, Setting
from polyxla.errors import UsageError
from polyxla.launcher.launch import Membership, connected, make_choices, memberships, run_job
from polyxla.launcher.ports import LOCALHOST, free_ports
from polyxla.launcher.processes import Terminated
from polyxla.launcher.start_methods import interpreter_options, prepared_processes
from polyxla.plugin_manager import load_plugins
from polyxla.selection import Selection, select


@dataclass(frozen=True)
class RunPlan:
    """The choices of one ``polyxla run``.

    Attributes:
        command: Python with the module that runs the program, the program, and its arguments.
        selection: the chosen runtime and the reason.
        devices: indices of the devices.
        variables: variables to add to the environment.
        origins: which option or variable each comes from.
        each: whether the program runs once in every replica.
    """

    command: tuple[str, ...]
    selection: Selection
    devices: tuple[int, ...]
    variables: dict[str, str]
    origins: dict[str, str]
    each: bool = False

    def program_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the program's environment; `environ` is this process's."""
        return {**environ, **self.variables, env.POLYXLA_RUN: json.dumps(self.origins)}

    def shown_variables(self) -> dict[str, str]:
        """Return the variables as they are printed: without the secret of several hosts."""
        return {name: shown(name, value) for name, value in self.variables.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON-compatible values, for ``--json``."""
        chosen = self.selection
        why = {"runtime": chosen.runtime, "reason": chosen.reason, "warnings": list(chosen.warnings)}
        where = {"devices": list(self.devices), "each": self.each, "environment": self.shown_variables()}
        return {**why, **where, "command": list(self.command)}


def make_run_plan(
    environ: Mapping[str, str], settings: LaunchSettings, program: Sequence[str], each: bool = False
) -> RunPlan:
    """Make the plan, and check all that can be checked before the program starts.

    Raises:
        UsageError: the program does not exist, or the runtime, devices, precision or wait cannot be used.
    """
    # The cheapest checks come first, because discovery may ask a metadata server.
    _check_program(program)
    _check_wait(settings.wait_s)
    selection = select(environ, settings.runtime)
    chosen = make_choices(selection, environ, settings)
    variables = dict(chosen.variables)
    variables[env.POLYXLA_RUNTIME] = selection.runtime
    origin = "polyxla run, which chose it" if selection.implicit else selection.reason
    origins = {f"{env.POLYXLA_RUNTIME}={selection.runtime}": origin}
    texts = {
        # Set for --devices auto as well, which must win over the variable.
        env.POLYXLA_DEVICES: (settings.devices, json.dumps(list(chosen.devices))),
        env.POLYXLA_PRECISION: (settings.precision, str(settings.precision.value)),
        env.POLYXLA_WAIT_S: (settings.wait_s, str(settings.wait_s.value)),
    }
    for name, (setting, text) in texts.items():
        if setting.origin != "default":
            variables[name] = text
            origins[f"{name}={text}"] = setting.origin
    command = (sys.executable, "-m", script.__name__, *program)
    return RunPlan(command, selection, chosen.devices, variables, origins, each)


def replace_process(plan: RunPlan, environ: Mapping[str, str]) -> NoReturn:
    """Become the program; if a prepared process runs it, pass on its signals, and end as it ends."""
    # execve drops what Python has buffered.
    sys.stdout.flush()
    sys.stderr.flush()
    # A Ctrl-C waits until the program's process can report it: python itself would print a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    environ = plan.program_environment(environ)
    # Returns only if no prepared process fits; the program is then started in the ordinary way.
    if ready := prepared_processes():
        ready.run_program(plan.command, environ)
    python, *arguments = plan.command
    os.execve(python, [python, *interpreter_options(), *arguments], environ)


def _check_program(command: Sequence[str]) -> None:
    if command[0] == "-m":
        _check_module(command[1:])
    elif not os.path.exists(command[0]):
        raise UsageError(
            f"there is no file {command[0]!r} in {env.working_directory()}",
            where="polyxla run",
            fix="Write the path of a script, or -m and the name of a module.",
        )
    elif os.path.isdir(command[0]) and not os.path.exists(os.path.join(command[0], "__main__.py")):
        raise UsageError(
            f"the directory {command[0]!r} has no __main__.py",
            where="polyxla run",
            fix="Write the path of a script in it.",
        )


def _check_module(rest: Sequence[str]) -> None:
    if not rest:
        raise UsageError("-m names no module", where="polyxla run", fix="Write -m and the name of a module.")
    package = rest[0].partition(".")[0]
    # `python -m` also finds modules in the current directory.
    sys.path.insert(0, str(env.working_directory()))
    # Only the top package: finding a submodule imports its parents, which would run the user's code here.
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"there is no module {rest[0]!r}",
            where="polyxla run -m",
            fix="Install it into this environment, or run its file: polyxla run path/to/script.py.",
        )


def _check_wait(wait_s: Setting) -> None:
    try:
        seconds = float(wait_s.value)
    except ValueError:
        # NaN fails every comparison, and so becomes the same error as a number out of range.
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(
            f"{wait_s.value!r} is not a number of seconds, 0 or more",
            where=wait_s.origin,
            fix="Write the longest wait for devices that another job is using, such as 600, or leave it out.",
        )


def run_each(plan: RunPlan, environ: Mapping[str, str]) -> NoReturn:
    """Run the program in every replica, wait for all, and exit with the code of the first that fails."""
    # On several hosts, the user says where torch.distributed's store is. Some runtimes choose another port.
    one_host = plan.selection.discovery.host_count == 1
    store = {"MASTER_ADDR": LOCALHOST, "MASTER_PORT": str(free_ports(1)[0])} if one_host else {}
    job = Job(
        main=_run_program,
        function=script.run,
        # The program and its arguments, without python -m polyxla.cli.script.
        args=(plan.command[3:],),
        runtime=plan.selection.runtime,
        devices=plan.devices,
        environ={**store, **plan.program_environment(environ)},
        precision=Setting(None, "default"),
        start_method="forkserver",
        own_processes=True,
    )
    _pass_on_signals()
    try:
        run_job(job, load_plugins(job.runtime))
    except KeyboardInterrupt:
        end_interrupted()
    except Terminated as request:
        signal.signal(request.number, signal.SIG_DFL)
        signal.raise_signal(request.number)
    except Exception as error:
        # typer has replaced it, and would print this process's traceback above the replica's.
        sys.excepthook = sys.__excepthook__
        script.fail(error)
    sys.exit(0)


def _pass_on_signals() -> None:
    """Let the launch end by an exception at Ctrl-C, and when the command is to end, as its program would."""
    # The handler of the whole command ends it at once, and the replicas could not run their `finally` blocks.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup makes a program ignore SIGHUP.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _terminate)


def _terminate(number: int, _: object) -> NoReturn:
    # timeout(1) sends it to this process, and then once more to the group.
    signal.signal(number, signal.SIG_IGN)
    raise Terminated(number)


def _run_program(job: Job, place: Any) -> ReplicaResult:
    """Run the program in a replica, whose process is the replica from now on."""
    with connected(job, place, load_plugins(job.runtime)) as replication:
        # A program owns its process: its module is __main__, and it may install signal handlers.
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"runtime {job.runtime!r} puts several replicas into a process, not a program into each",
                where="--each",
                fix="Launch the replicas in the program, by polyxla.launch.",
            )
        world = replication.world
        numbers = {"RANK": world.ordinal, "LOCAL_RANK": world.local_ordinal}
        numbers |= {"WORLD_SIZE": world.world_size, "LOCAL_WORLD_SIZE": world.local_world_size}
        # Only after connecting: a TPU's ordinals are known once its processes have met.
        env.update_environ({name: str(number) for name, number in numbers.items()})
        own = Membership(job, replication)
        memberships.append(own)
        # Connecting has imported torch_xla if the runtime is on it. A program without it must not pay for its
        # import.
        if "torch_xla" in sys.modules:
            from polyxla.xla import torch_xla_launch

            torch_xla_launch.join()
        try:
            job.function(*job.args)
        except SystemExit as end:
            # For a program, unlike a launched function, sys.exit(0) is a normal end.
            if end.code not in (None, 0):
                raise
        return ReplicaResult(world.ordinal, None, own.summaries)
