"""The hooks of polyxla-core, in the order in which they fire. docs/plugins.md contains a working plugin.

Hooks are called a few times per process: they discover things and announce events. Code that runs at every
step is a method of an object that a hook returned (`polyxla.contracts.replication.Replication`,
`polyxla.contracts.precision.Precision`). An implementation may omit arguments that it does not need.

A package that adds events declares their hook specs in a module of its own, registered in the entry-point
group ``polyxla.hookspecs``, as polyxla-training does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch
    import typer

    from polyxla.contracts.discovery import Discovery
    from polyxla.contracts.job import Job
    from polyxla.contracts.precision import Precision
    from polyxla.contracts.replication import Replication, Sharding, World
    from polyxla.replica.replica import Replica

PROJECT = "polyxla"
"""The name that marks hook specs and implementations as polyxla's."""
hookspec = pluggy.HookspecMarker(PROJECT)
"""Decorator that declares a function as a hook."""
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator that marks a function of a plugin module, or a method of a listener, as a hook implementation.

The function's name selects the hook, and its arguments are any of the hook's, by name. Options are pluggy's,
such as ``@hookimpl(tryfirst=True)``. A package that does not depend on polyxla can make the same marker with
``pluggy.HookimplMarker("polyxla")``.
"""


@hookspec
def polyxla_add_commands(app: typer.Typer) -> None:
    """Add commands to the ``polyxla`` command line.

    Called once, in the command's process, on every installed plugin, including runtimes that are not chosen.
    Do not import heavy modules here: ``polyxla --help`` waits for it.
    """


@hookspec
def polyxla_discover_devices(environ: Mapping[str, str], accelerator: str) -> Discovery:  # type: ignore[empty-body]
    """Return the devices that this runtime finds here, and how strongly the environment asks for it.

    Called on each runtime separately, in the launching process, once per choice. It must not touch a device,
    import torch or take longer than a few seconds. Report a wrong setting as `Discovery.unavailable`; do not
    raise.

    Args:
        environ: the environment to examine, instead of `os.environ`.
        accelerator: ``"auto"``, or the requested kind of device in lower case (``"cpu"``, ``"tpu"``).
    """


@hookspec
def polyxla_variables() -> Collection[str]:  # type: ignore[empty-body]
    """Return the names of this plugin's environment variables that begin with ``POLYXLA_``, read or set.

    Called if such a variable is set that the core does not know. One that no plugin declares is reported.
    """


@hookspec(firstresult=True)
def polyxla_environment(
    environ: Mapping[str, str], discovery: Discovery, devices: tuple[int, ...]
) -> dict[str, str] | None:
    """Return the variables that a process on these devices must start with.

    Called on the chosen runtime, in the launching process, before a launch or ``polyxla run``. The variables
    are added to a copy of `environ`; the launching process's environment does not change. None: no variables.

    Args:
        environ: the environment that `polyxla_discover_devices` examined.
        discovery: this runtime's answer to `polyxla_discover_devices`.
        devices: indices of the devices to use.

    Raises:
        UsageError: the runtime cannot use these devices together.
    """


@hookspec
def polyxla_prepare(environ: Mapping[str, str], discovery: Discovery, devices: tuple[int, ...]) -> None:
    """Start slow preparations for a launch in the background, such as a fork server.

    Called on the chosen runtime by ``polyxla run``, in the program's process, before its first line. It must
    return at once and start no thread in this process. The program may never launch.

    Args:
        environ: this process's environment, including the variables of `polyxla_environment`.
        discovery: this runtime's answer to `polyxla_discover_devices` there.
        devices: indices of the devices that the environment asks for.
    """


@hookspec(firstresult=True)
def polyxla_preload(environ: Mapping[str, str]) -> Sequence[str] | None:
    """Called by ``polyxla warm on``: return the modules to import for launches, which must start nothing."""


@hookspec
def polyxla_forked() -> None:
    """Called in a fork: re-apply the import-time setup of `polyxla_preload`'s modules in this environment."""


@hookspec(firstresult=True)
def polyxla_launch_pod(pod: str, function: Any, options: Mapping[str, Any]) -> list[Any] | None:
    """Launch on every host of `pod`; return all results in ordinal order, or None if it is another plugin's.

    Called on every installed plugin, once per ``polyxla.launch(..., pod=...)``, instead of all other hooks.
    `options` are its other arguments by name, for the launch on each host. When a replica raises, end the
    launches on the other hosts and raise its exception here.
    """


@hookspec(firstresult=True)
def polyxla_launch(job: Job) -> list[Any]:  # type: ignore[empty-body]
    """Start every replica of `job`, wait for all, and return what ``job.run`` returned in each, in any order.

    Called on the chosen runtime, once per launch, in the launching process. The runtime starts the processes
    and threads, and calls ``job.run(place)`` once in each replica; `place` is any object that identifies the
    replica to the runtime. When a replica raises, stop the others and raise its exception here.
    """


@hookspec(firstresult=True)
def polyxla_replication(job: Job, place: Any) -> Replication:  # type: ignore[empty-body]
    """Return this replica's connection to its device and to the other replicas.

    Called on the chosen runtime, once in each replica, in its process and thread, before the user's function.
    Earlier hooks must not touch a device.
    """


@hookspec(firstresult=True)
def polyxla_precision(name: str) -> Precision | None:
    """Return the precision policy called `name`, or None if this plugin does not know it.

    Called in the launching process, so that a wrong name is refused early, and once in each replica.

    Raises:
        ValueError: `name` is known but must not be used; the text is the reason.
    """


@hookspec
def polyxla_replica_started(replica: Replica) -> None:
    """Receive a replica that has its device. Called once in each replica, before the user's function."""


@hookspec(firstresult=True)
def polyxla_shard_loader(loader: Any, world: World, seed: int, repeat: bool) -> Any | None:
    """Return a loader that reads only this replica's records of `loader`; None to leave it to other plugins.

    Called once per loader in each replica, even for a single replica, because the returned loader may
    be able to save and resume its position: see `polyxla.replica.loader.LoaderShard`.

    Args:
        loader: the user's loader.
        world: this replica's numbers among all replicas.
        seed: seed of shuffled orders, the same in every replica.
        repeat: whether repeated records, which give every replica the same number of records, count like all
            others (training). Otherwise none is in a batch, except in those that `LoaderShard.marked` marks.
    """


@hookspec(firstresult=True)
def polyxla_shard_module(
    replica: Replica,
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: Mapping[str, int],
    take_first: bool,
) -> Sharding | None:
    """Move a module to the device in shards and return how it is divided; None to leave it to other plugins.

    Called once per `Replica.setup` with a mesh, in each replica.

    Args:
        replica: sets up the module, which its precision policy has converted.
        module: sharded in place.
        optimizers: optimizers of its parameters; afterwards they hold the shards.
        mesh: size of each dimension by its name.
        take_first: whether the parameters differ between replicas, so that all take ordinal 0's.
    """


@hookspec
def polyxla_step_finished(replica: Replica, step: int, logged: Mapping[str, Any]) -> None:
    """Receive a step that was submitted to the device. Called once per optimizer update in each replica.

    Values in `logged` may be tensors that the device has not computed yet. Reading one waits for the device,
    so read rarely.

    Args:
        replica: the replica that stepped.
        step: number of updates so far, from 1.
        logged: the step's logged values, by name.
    """


@hookspec
def polyxla_replica_summary(replica: Replica) -> Any | None:
    """Return what `polyxla_launch_finished` is to receive of this replica; None for nothing.

    Called once in each replica whose function returned. The answer is pickled, so keep it small. Do not use
    collectives: other replicas may still train, or have ended.
    """


@hookspec
def polyxla_replica_stopped(replica: Replica, error: BaseException | None) -> None:
    """Receive the end of the user's function, or the `error` that ended it. Called once in each replica."""


@hookspec
def polyxla_launch_finished(summaries: Mapping[int, Sequence[Any]]) -> None:
    """Receive the summaries of all replicas that the launching process started.

    Called once per launch in the launching process, after every replica's function returned.

    Args:
        summaries: what the implementations of `polyxla_replica_summary` returned in each replica, by ordinal.
    """
