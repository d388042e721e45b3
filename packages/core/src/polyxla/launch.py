"""Starting a function in every replica: choose, check everything that can be checked, then launch."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import pluggy

from polyxla import env
from polyxla.devices import pick_devices
from polyxla.env import Setting
from polyxla.errors import UsageError
from polyxla.notices import say_once
from polyxla.plugins import load_plugins
from polyxla.precision import Precision, find_precision
from polyxla.replica import Replica
from polyxla.seeding import host_seed
from polyxla.selection import Selection, select

if TYPE_CHECKING:
    from polyxla.processes import ProcessMethod

StartMethod = Literal["auto", "inline", "spawn", "forkserver", "fork"]
"""How replicas start: ``inline`` in the calling process (one replica), ``spawn`` in fresh processes,
``forkserver`` in forks of one fresh process that has imported what all need, ``fork`` in forks of the
calling process, with all that it has made."""


@dataclass(frozen=True)
class Job:
    """One launch: what every replica runs, and on what. It travels to the replicas' processes.

    Attributes:
        function: called as ``function(replica, *args)``.
        args: the rest of its arguments.
        runtime: the chosen runtime's name.
        devices: indices of the devices, one per replica.
        environ: the environment that a replica's process starts with.
        precision: the precision policy or its name, with its origin.
        start_method: how the replicas start.
        seed: where the devices' random numbers come from: torch's seed in the launching process.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    runtime: str
    devices: tuple[int, ...]
    environ: Mapping[str, str]
    precision: Setting
    start_method: StartMethod = "auto"
    seed: int = 0

    @property
    def process_method(self) -> ProcessMethod | None:
        """How a process is to be made for a replica; None where it may run in this one."""
        return None if self.start_method in ("auto", "inline") else cast("ProcessMethod", self.start_method)

    def run(self, place: Any = None) -> Any:
        """Be one replica: connect, tell the listeners, call the function, leave.

        Called by the runtime once per replica, in the replica's own process and thread.

        Args:
            place: handed to the runtime's `polyxla_replication`, so that it knows which replica this is.
        """
        ordinal: int | None = None
        try:
            plugins = load_plugins(self.runtime)
            policy = find_precision(plugins, self.precision)
            replication = plugins.hook.polyxla_replication(job=self, place=place)
            ordinal = replication.world.ordinal
            with contextlib.closing(replication):
                return self._call(Replica(replication, plugins, policy, self.runtime), plugins)
        except BaseException as error:
            who = (
                "a replica that could not connect"
                if ordinal is None
                else f"the replica with ordinal {ordinal}"
            )
            error.add_note(f"raised in {who} on {socket.gethostname()}")
            raise

    def _call(self, replica: Replica, plugins: pluggy.PluginManager) -> Any:
        failure: BaseException | None = None
        replica.seed_device(self.seed)
        plugins.hook.polyxla_replica_started(replica=replica)
        try:
            return self.function(replica, *self.args)
        except BaseException as error:
            failure = error
            raise
        finally:
            plugins.hook.polyxla_replica_stopped(replica=replica, error=failure)


def launch(
    train_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    runtime: str | None = None,
    accelerator: str = "auto",
    devices: int | str | Sequence[int] = "auto",
    precision: str | int | Precision | None = None,
    start_method: StartMethod = "auto",
) -> list[Any]:
    """Run ``train_fn(replica, *args)`` in every replica and wait for all of them.

    What is not given here is taken from the environment (``POLYXLA_RUNTIME``, ``POLYXLA_DEVICES``,
    ``POLYXLA_PRECISION``), then from the defaults. The caller's environment is as it was
    afterwards, but for what an inline replica's own code set in it.

    Args:
        train_fn: what each replica calls, with its `polyxla.Replica` first.
        args: the other arguments; each process gets its own copy.
        runtime: a runtime's name; default: chosen from the environment.
        accelerator: ``"auto"``, or the kind of device to insist on (``"cpu"``, ``"tpu"``).
        devices: ``"auto"``, a count, or indices (``[5]`` is the device with index 5).
        precision: a precision policy's name, or the policy itself.
        start_method: ``"inline"`` runs one replica in this process, ``"spawn"`` starts fresh
            processes, ``"forkserver"`` forks them from one that is prepared, ``"fork"`` from this one;
            ``"auto"`` leaves it to the runtime.

    Returns:
        The functions' results in ordinal order.

    Raises:
        UsageError: something that was asked for cannot be had; nothing was started.
        ReplicaLostError: a replica's process died without a result.
        StalledError: replicas waited for each other too long.
        Exception: whatever `train_fn` raised in a replica, with its ordinal and host in a note.
    """
    _check_call(train_fn, args, start_method)
    environ = env.snapshot()
    settings = env.from_environ(
        environ,
        runtime=_given("runtime", runtime),
        devices=_given("devices", None if devices == "auto" else devices),
        precision=_given("precision", precision),
    )
    selection = select(environ, settings.runtime, accelerator.lower())
    announce(selection)
    indices = picked(settings.devices, selection)
    plugins = load_plugins(selection.runtime)
    if told := find_precision(plugins, settings.precision).describe():
        say_once(told)
    job = Job(
        function=train_fn,
        args=tuple(args),
        runtime=selection.runtime,
        devices=indices,
        environ=environ | child_environment(plugins, environ, selection, indices),
        precision=settings.precision,
        start_method=start_method,
        seed=host_seed(),
    )
    results: list[Any] = plugins.hook.polyxla_launch(job=job)
    return results


def announce(selection: Selection) -> None:
    """Say the warnings of a choice, and the choice itself where nobody named the runtime; each once."""
    for warning in selection.warnings:
        say_once(warning)
    if selection.implicit:
        say_once(f"runtime {selection.runtime}: {selection.reason}")


def picked(asked: Setting, selection: Selection) -> tuple[int, ...]:
    """Return the indices of the devices to use, of those that the chosen runtime has."""
    found = selection.discovery
    return pick_devices(asked, selection.runtime, found.devices, found.growable)


def child_environment(
    plugins: pluggy.PluginManager, environ: Mapping[str, str], selection: Selection, devices: tuple[int, ...]
) -> dict[str, str]:
    """Return the variables that the chosen runtime wants in a process on `devices`."""
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
            fix="Write args=(argument,), with the comma, also for a single one.",
        )
    if start_method not in StartMethod.__args__:  # type: ignore[attr-defined]
        raise UsageError(
            f"start_method={start_method!r} is none of {', '.join(StartMethod.__args__)}",  # type: ignore[attr-defined]
            where="start_method",
            fix="Leave it out, or write start_method='spawn'.",
        )
