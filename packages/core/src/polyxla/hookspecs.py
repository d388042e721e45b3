"""Every hook of polyxla-core, in the order they fire. docs/plugins.md carries a working plugin.

Hooks discover things and announce events. What runs every step is a method of an object that a hook
returned (`polyxla.contracts.replication.Replication`, `polyxla.contracts.precision.Precision`). An
implementation may leave out arguments that it does not need.

A package with events of its own declares their specs in a module that it names in the entry-point group
``polyxla.hookspecs``, as polyxla-training does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import typer

    from polyxla.contracts.discovery import Discovery
    from polyxla.contracts.job import Job
    from polyxla.contracts.precision import Precision
    from polyxla.contracts.replication import Replication
    from polyxla.contracts.world import World
    from polyxla.replica.replica import Replica

PROJECT = "polyxla"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add commands to the ``polyxla`` command line.

    Called once, in the command's process, on every installed plugin whichever runtime is chosen.
    Import nothing heavy here: ``polyxla --help`` waits for it.
    """


@hookspec
def polyxla_discover_devices(environ: Mapping[str, str], accelerator: str) -> Discovery:  # type: ignore[empty-body]
    """Say what this runtime can see here and whether the environment asks for it.

    Called on each runtime by itself, in the process that launches, once per choice. It must not
    start a runtime, import torch or wait longer than a few seconds: a wrong setting is reported as
    `Discovery.unavailable`, not raised.

    Args:
        environ: the environment to judge by; never `os.environ` itself.
        accelerator: ``"auto"``, or the kind a person asked for in lower case (``"cpu"``, ``"tpu"``).
    """


@hookspec(firstresult=True)
def polyxla_environment(
    environ: Mapping[str, str], discovery: Discovery, devices: tuple[int, ...]
) -> dict[str, str] | None:
    """Return the variables that a process on these devices must start with.

    Called on the chosen runtime, before a launch or ``polyxla run``. What is returned is laid over
    `environ`; the calling process's own environment stays as it is. None: nothing is needed.

    Args:
        environ: the environment that was judged.
        discovery: what this runtime answered to `polyxla_discover_devices`.
        devices: indices of the devices that were picked from it.

    Raises:
        UsageError: the runtime cannot use these devices together.
    """


@hookspec
def polyxla_prepare(environ: Mapping[str, str]) -> None:
    """Begin, in the background, what a launch will need and what takes long.

    Called on the chosen runtime when ``polyxla run`` is about to run a program, in that program's process
    before its first line. It must return at once, and start no thread here; the program may never launch.

    Args:
        environ: this process's environment, with what `polyxla_environment` returned in it.
    """


@hookspec(firstresult=True)
def polyxla_launch(job: Job) -> list[Any]:  # type: ignore[empty-body]
    """Start every replica of `job`, wait for all, return their results in ordinal order.

    Called on the chosen runtime, once per launch, in the launching process. The runtime arranges
    processes and threads, and calls ``job.run(place)`` once in each replica with a `place` of its
    own making. When one replica raises, the others are stopped and its exception leaves here.
    """


@hookspec(firstresult=True)
def polyxla_replication(job: Job, place: Any) -> Replication:  # type: ignore[empty-body]
    """Return this replica's connection to its device and to the other replicas.

    Called on the chosen runtime, once in each replica, in its process and thread, before the
    person's function. This is where a device may be touched for the first time.
    """


@hookspec(firstresult=True)
def polyxla_precision(name: str) -> Precision | None:
    """Return the precision policy called `name`, or None where this plugin does not know it.

    Called in the launching process, to refuse a bad name early, and once in each replica.

    Raises:
        ValueError: this plugin knows why nobody should use `name`; the text is the reason.
    """


@hookspec
def polyxla_replica_started(replica: Replica) -> None:
    """Hear that a replica has its device. Called once in each replica, before the person's function."""


@hookspec(firstresult=True)
def polyxla_shard_loader(loader: Any, world: World, seed: int, repeat: bool) -> Any | None:
    """Return a loader like `loader` that reads only this replica's records; None to leave it to others.

    Called once per loader in each replica, also for a single one: what comes back may also be able to say
    where it stands and to go on from there (`polyxla.replica.loader.Source`).

    Args:
        loader: what the person passed.
        world: where this replica stands.
        seed: the same in every replica; orders that are shuffled come from it.
        repeat: whether records may be read twice to give every replica as many (training), or must be told
            apart by `polyxla.replica.loader.Source.valid_records` (evaluation).
    """


@hookspec
def polyxla_step_finished(replica: Replica, step: int, logged: Mapping[str, Any]) -> None:
    """Hear that an optimizer update was handed to the device. Called once per update in each replica.

    The values in `logged` may be tensors that the device has not computed yet: reading one waits
    for it, so read seldom.

    Args:
        replica: the replica that stepped.
        step: number of updates so far, from 1.
        logged: what the step reported, by name.
    """


@hookspec
def polyxla_replica_stopped(replica: Replica, error: BaseException | None) -> None:
    """Hear that a replica's function returned, or that `error` ended it. Called once in each replica."""
