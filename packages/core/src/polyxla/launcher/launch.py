"""`launch`: choose the runtime, check everything that can be checked, then start the replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pluggy

from polyxla import env
from polyxla.console import say_once
from polyxla.contracts.job import Job, StartMethod
from polyxla.contracts.precision import Precision
from polyxla.env import Setting
from polyxla.errors import UsageError
from polyxla.launcher.replica_main import run_replica
from polyxla.plugins.device_request import pick_devices
from polyxla.plugins.manager import load_plugins
from polyxla.plugins.precision_lookup import find_precision
from polyxla.plugins.selection import Selection, select
from polyxla.replica.random_state import host_seed


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
    indices = select_devices(settings.devices, selection)
    plugins = load_plugins(selection.runtime)
    if told := find_precision(plugins, settings.precision).describe():
        say_once(told)
    job = Job(
        main=run_replica,
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


def select_devices(asked: Setting, selection: Selection) -> tuple[int, ...]:
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
