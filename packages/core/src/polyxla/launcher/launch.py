"""`launch`: choose the runtime, check the whole request, start the replicas; and what each replica does."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pluggy

from polyxla import env, presence, tracebacks, xla
from polyxla.console import say_once
from polyxla.contracts.discovery import Device
from polyxla.contracts.job import Job, ReplicaResult, StartMethod
from polyxla.contracts.precision import Precision
from polyxla.contracts.replication import Replication
from polyxla.env import LaunchSettings, Setting
from polyxla.errors import UsageError, pip_install
from polyxla.plugin_manager import PluginManager, load_everything, load_plugins
from polyxla.process_settings import process_settings
from polyxla.replica.random_state import host_seed
from polyxla.replica.replica import Replica
from polyxla.selection import Selection, find_precision, pick_devices, select_once
from polyxla.tracebacks import Folded

Result = TypeVar("Result")


def launch(
    train_fn: Callable[..., Result],
    args: Sequence[Any] = (),
    *,
    runtime: str | None = None,
    accelerator: str = "auto",
    devices: int | str | Sequence[int] = "auto",
    precision: str | int | Precision | None = None,
    start_method: StartMethod = "auto",
    pod: str | None = None,
) -> list[Result]:
    """Run ``train_fn(replica, *args)`` in every replica and wait for all of them.

    Arguments that are left out are taken from the environment (``POLYXLA_RUNTIME``, ``POLYXLA_DEVICES``,
    ``POLYXLA_PRECISION``), then from the defaults. The caller's environment is restored afterwards, except
    for variables that the code of an inline replica sets itself.

    Call it from one thread at a time: an inline replica changes the environment of the whole process.
    Launches do not nest: in a replica the device is in use, so runtimes on torch_xla refuse another launch.

    Args:
        train_fn: called in each replica, with its `polyxla.Replica` as the first argument.
        args: its other arguments; each process receives a copy.
        runtime: a runtime's name; default: chosen from the environment.
        accelerator: ``"auto"``, or the required kind of device (``"cpu"``, ``"tpu"``).
        devices: ``"auto"``, a count, or indices (``[5]`` is the device with index 5).
        precision: a precision policy, or its name.
        start_method: ``"inline"`` runs one replica in this process, ``"spawn"`` starts fresh processes,
            ``"forkserver"`` forks them from a process that has imported the heavy modules, ``"fork"`` forks
            this process; ``"auto"`` leaves the choice to the runtime.
        pod: ``"ray"`` launches on each host of a TPU in a Ray cluster, and needs no devices here.

    Returns:
        The functions' results in ordinal order: those of all hosts with `pod`, this host's without it; in a
        replica of ``polyxla run --each`` or torchrun, its own.

    Raises:
        UsageError: the request cannot be met; nothing was started.
        ReplicaLostError: a replica process ended without a result, or a replica called ``sys.exit``.
        StalledError: replicas waited for each other too long.
        Exception: the exception that `train_fn` raised in a replica, with a note that names the replica.
    """
    _check_call(train_fn, args, start_method)
    if pod is not None:
        how = {"runtime": runtime, "accelerator": accelerator, "devices": devices, "precision": precision}
        with Folded():
            return _launch_on(pod, train_fn, {"args": args, "start_method": start_method, **how})
    # `polyxla run` reports a program that has launched nothing; a failed launch counts, so record it first.
    xla.launches.append(train_fn)
    # The environment is read once, so that all later steps agree whatever other threads change.
    environ = env.snapshot()
    settings = env.from_environ(
        environ,
        runtime=_given("runtime", runtime),
        devices=_given("devices", None if devices == "auto" else devices),
        precision=_given("precision", precision),
    )
    if memberships:
        # Under ``polyxla run --each`` this process is a replica already.
        return [_join(memberships[0], train_fn, args, settings)]
    selection = select_once(environ, settings.runtime, accelerator.lower())
    # Announce it before the devices are checked: the choice of the runtime may explain their error.
    announce(selection)
    chosen = make_choices(selection, environ, settings)
    if note := chosen.precision.describe():
        say_once(note)
    job = Job(
        main=run_replica,
        function=train_fn,
        args=tuple(args),
        runtime=selection.runtime,
        devices=chosen.devices,
        environ={**environ, **chosen.variables},
        precision=settings.precision,
        start_method=start_method,
        seed=host_seed(),
        settings=process_settings(),
    )
    with Folded():
        return [result.value for result in run_job(job, chosen.plugins)]


def _launch_on(pod: str, function: Any, options: Mapping[str, Any]) -> list[Any]:
    hook = load_everything().hook
    found: list[Any] | None = hook.polyxla_launch_pod(pod=pod, function=function, options=options)
    if found is None:
        raise UsageError(
            f"no installed plugin launches on a pod called {pod!r}",
            where=f"pod={pod!r}",
            fix=f"Write pod='ray', and install its package ({pip_install('polyxla-pod[ray]')}).",
        )
    return found


def _join(replica: Membership, function: Any, args: Any, asked: LaunchSettings) -> Any:
    """Run a launch in a process that is itself a replica, by ``polyxla run --each``; return its result."""
    whole = replica.job
    count = len(pick_devices(asked.devices, whole.runtime, [Device(i, "", "") for i in whole.devices]))
    if asked.runtime.value != whole.runtime or count != len(whole.devices):
        raise UsageError(
            f"this process is one of {len(whole.devices)} replicas on runtime {whole.runtime!r}, which a "
            f"launch for {count} on {asked.runtime.value!r} cannot join",
            where="polyxla run --each",
            fix="Leave runtime and devices out of the launch, or leave --each out.",
        )
    # The process keeps its device; only the function, its precision and the seed are the launch's own.
    job = replace(whole, function=function, args=tuple(args), precision=asked.precision, seed=host_seed())
    result = call(job, replica.replication, load_plugins(whole.runtime))
    replica.summaries += result.summaries
    return result.value


@dataclass(frozen=True)
class Choices:
    """What a launch, or ``polyxla run``, uses beside the runtime.

    Attributes:
        devices: indices of the devices.
        plugins: the runtime and all other plugins.
        precision: the precision policy.
        variables: those that a process on the devices needs, by the runtime.
    """

    devices: tuple[int, ...]
    plugins: PluginManager
    precision: Precision
    variables: Mapping[str, str]


def make_choices(selection: Selection, environ: Mapping[str, str], settings: LaunchSettings) -> Choices:
    """Make every choice that follows the runtime's; nothing is started.

    Raises:
        UsageError: the devices or the precision cannot be used, or a plugin is broken.
    """
    devices = select_devices(settings.devices, selection)
    plugins = load_plugins(selection.runtime)
    precision = find_precision(plugins, settings.precision)
    variables = child_environment(plugins, environ, selection, devices)
    return Choices(devices, plugins, precision, variables)


def run_job(job: Job, plugins: PluginManager) -> list[ReplicaResult]:
    """Start every replica, wait for all, notify the listeners; return the results in ordinal order."""
    results: list[ReplicaResult] = plugins.hook.polyxla_launch(job=job)
    # Replicas are not numbered in the order in which they start: libtpu goes by their chips' coordinates.
    results = sorted(results, key=lambda result: result.ordinal)
    plugins.hook.polyxla_launch_finished(summaries={result.ordinal: result.summaries for result in results})
    return results


def announce(selection: Selection) -> None:
    """Print a selection's warnings, and the selection itself if the user named no runtime; each line once."""
    for warning in selection.warnings:
        say_once(warning)
    if selection.implicit:
        say_once(f"runtime {selection.runtime}: {selection.reason}")


def select_devices(asked: Setting, selection: Selection) -> tuple[int, ...]:
    """Return the indices of the requested devices of the chosen runtime."""
    found = selection.discovery
    return pick_devices(asked, selection.runtime, found.devices, found.growable)


def child_environment(
    plugins: pluggy.PluginManager, environ: Mapping[str, str], selection: Selection, devices: tuple[int, ...]
) -> dict[str, str]:
    """Return the variables that a process on `devices` needs, by the chosen runtime."""
    wanted: dict[str, str] | None = plugins.hook.polyxla_environment(
        environ=environ, discovery=selection.discovery, devices=devices
    )
    return wanted or {}


def _given(name: str, value: Any) -> Setting | None:
    return None if value is None else Setting(value, f"{name}={value!r}")


def _check_call(train_fn: Any, args: Any, start_method: str) -> None:
    if not callable(train_fn):
        raise UsageError(
            f"launch needs a function, not {train_fn!r}",
            where="train_fn",
            fix="Pass the function itself, and its arguments as args=(...).",
        )
    if not isinstance(args, list | tuple):
        raise UsageError(
            f"args={args!r} is not a list or tuple of arguments",
            where="args",
            fix="Write args=(argument,), with the comma even for a single argument.",
        )
    # Otherwise each replica would raise a TypeError; here it is an error of one line.
    if problem := call_problem(train_fn, (None, *args)):
        call = ", ".join(["replica", *map(_brief, args)])
        name = getattr(train_fn, "__name__", type(train_fn).__name__)
        raise UsageError(
            f"{name} cannot be called as {name}({call}): {problem}",
            where="train_fn",
            fix="Its first argument is the replica; the others are those in args=(...).",
        )
    if start_method not in StartMethod.__args__:  # type: ignore[attr-defined]
        raise UsageError(
            f"start_method={start_method!r} is not one of {', '.join(StartMethod.__args__)}",  # type: ignore[attr-defined]
            where="start_method",
            fix="Leave it out, or write start_method='spawn'.",
        )


def call_problem(function: Callable[..., Any], args: Sequence[Any]) -> str | None:
    """Return why a function cannot be called with these arguments; None if it can, or if nothing tells."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Functions in C need not describe their arguments.
        return None
    try:
        signature.bind(*args)
    except TypeError as error:
        return str(error)
    return None


def _brief(value: Any) -> str:
    text = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
    return text if len(text) <= 30 else f"{text[:27]}..."


def run_replica(job: Job, place: Any) -> ReplicaResult:
    """Run one replica of `job`, in its process and thread; return its function's result with its ordinal.

    Args:
        job: the launch.
        place: the runtime's description of the replica, passed to `polyxla_replication`.
    """
    plugins = load_plugins(job.runtime)
    with connected(job, place, plugins) as replication:
        return call(job, replication, plugins)


@contextlib.contextmanager
def connected(job: Job, place: Any, plugins: PluginManager) -> Iterator[Replication]:
    """Connect this replica to its device and to the others. An exception gets a note with its ordinal."""
    ordinal: int | None = None
    try:
        replication: Replication = plugins.hook.polyxla_replication(job=job, place=place)
        ordinal = replication.world.ordinal
        # Closing waits for the device; only then has the replica done its part in all that it submitted.
        with presence.running(ordinal), contextlib.closing(replication):
            yield replication
    except BaseException as error:
        tracebacks.leave_replica(error, describe(ordinal))


def describe(ordinal: int | None) -> str:
    """Return how messages name this replica; None if it has no ordinal yet."""
    return "a replica that could not connect" if ordinal is None else f"the replica with ordinal {ordinal}"


def call(job: Job, replication: Replication, plugins: PluginManager) -> ReplicaResult:
    """Call the job's function with a new `Replica`, and notify the listeners."""
    replica = Replica(replication, plugins, find_precision(plugins, job.precision), job.runtime)
    # Pass a function, because messages read the number at the moment when they are written.
    presence.count_steps(replica.ordinal, lambda: replica.steps)
    failure: BaseException | None = None
    # torch's seed in the launching process does not reach the device's generator on XLA.
    replica.seed_device(job.seed)
    if job.settings:
        job.settings.apply()
    plugins.hook.polyxla_replica_started(replica=replica)
    try:
        value = job.function(replica, *job.args)
        summaries = plugins.hook.polyxla_replica_summary(replica=replica)
        return ReplicaResult(replica.ordinal, value, summaries)
    except BaseException as error:
        # Listeners learn of the error in `polyxla_replica_stopped`, also of KeyboardInterrupt and SystemExit.
        failure = error
        raise
    finally:
        plugins.hook.polyxla_replica_stopped(replica=replica, error=failure)


@dataclass
class Membership:
    """A whole process that is a replica, by ``polyxla run --each``: its launches join the job.

    Attributes:
        job: the job.
        replication: this replica's connection.
        summaries: those of the launches that have joined.
    """

    job: Job
    replication: Replication
    summaries: list[Any] = field(default_factory=list)


memberships: list[Membership] = []
"""At most one."""
