"""A job's cores and processes: which core each process drives, its ordinals, and its environment.

Pure functions over a `Configuration`; they never change the parent's environment.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyxla import UsageError
from polyxla.plugin import World
from polyxla_xrt import env
from polyxla_xrt.config.configuration import Configuration
from polyxla_xrt.config.device_map import DeviceKind
from polyxla_xrt.config.workers import WorkerId, write_workers


@dataclass(frozen=True)
class Core:
    """A device of a job.

    Attributes:
        kind: ``TPU``, unless a device map says otherwise.
        ordinal: its number among all devices of its kind.
        worker: the worker that owns it; the worker's task is the index of the host that drives it.
        index: its number within the worker.
    """

    kind: DeviceKind
    ordinal: int
    worker: WorkerId
    index: int

    @property
    def name(self) -> str:
        """The XRT name, such as ``TPU:3``."""
        return f"{self.kind}:{self.ordinal}"


def all_cores(configuration: Configuration) -> tuple[Core, ...]:
    """Return every device of a job, numbered worker by worker in list order.

    Source: torch_xla 1.13, computation_client.cc.
    """
    name, each = configuration.local_worker.name, configuration.devices_per_worker
    return tuple(
        Core(configuration.kind, task * each + index, WorkerId(name, task), index)
        for task in range(configuration.hosts)
        for index in range(each)
    )


def process_count(configuration: Configuration, nprocs: int | None = None) -> int:
    """Return how many processes this host starts.

    Args:
        configuration: the job's.
        nprocs: the ``nprocs`` argument of ``spawn``; None for one process per core.

    Raises:
        UsageError: the number is neither 1 nor the number of cores, or the configuration forbids it.
    """
    every = configuration.devices_per_worker
    count = every if nprocs is None else nprocs
    where = "nprocs" if nprocs is None else f"nprocs={nprocs}"
    _check_allowed(configuration, count, where)
    check_process_count(configuration, count, where)
    return count


def check_process_count(configuration: Configuration, count: int, where: str) -> None:
    """Check that the configuration allows this many processes on this host.

    Args:
        configuration: the job's.
        count: number of processes of this host.
        where: the setting that requested them, for the error.

    Raises:
        UsageError: the configuration describes the devices of one process, or several hosts have no mesh
            service.
    """
    if count > 1:
        _check_source(configuration, where)
    if configuration.hosts > 1 and configuration.mesh_address is None:
        raise UsageError(
            f"{configuration.hosts} hosts need the address of the mesh service",
            where=f"{env.XRT_MESH_SERVICE_ADDRESS} is unset",
            fix=f"Set {env.XRT_MESH_SERVICE_ADDRESS}=HOST:8477 on every host; HOST is the host of task 0.",
        )


def child_world(configuration: Configuration, index: int, count: int) -> World:
    """Return the world of a process of this host; each process holds one replica.

    Args:
        configuration: the job's.
        index: the index of the process on this host, ``0 <= index < count``.
        count: number of processes of each host.

    Raises:
        ValueError: this host has no process `index`.
    """
    host = configuration.host_index
    if not 0 <= index < count:
        raise ValueError(f"index={index} is not in 0 <= index < count={count}")
    world_size, ordinal = configuration.hosts * count, host * count + index
    return World(
        world_size=world_size,
        ordinal=ordinal,
        local_ordinal=index,
        local_world_size=count,
        process_index=ordinal,
        process_count=world_size,
        host_index=host,
        host_count=configuration.hosts,
    )


def child_environment(configuration: Configuration, index: int, count: int) -> dict[str, str | None]:
    """Return the changes to the environment of a process of this host; None removes a variable.

    Only ordinal 0 keeps the description of the workers; the others get it from the mesh service. If
    `Configuration.mesh_address` is None and there are several processes, the launcher adds the address that
    it chose. Arguments and errors are those of `child_world`.
    Source: torch_xla 1.13, xla_multiprocessing.py.
    """
    world = child_world(configuration, index, count)
    device = f"{configuration.kind}:{world.ordinal}"
    variables: dict[str, str | None] = {
        env.XRT_MULTI_PROCESSING_DEVICE: device,
        env.XRT_SHARD_ORDINAL: str(world.ordinal),
        env.XRT_SHARD_LOCAL_ORDINAL: str(world.local_ordinal),
        env.XRT_SHARD_WORLD_SIZE: str(world.world_size),
        env.XRT_HOST_WORLD_SIZE: str(world.host_count),
        env.XRT_LOCAL_WORKER: str(configuration.local_worker),
    }
    if world.ordinal:
        variables |= {env.XRT_TPU_CONFIG: None, env.TPU_NUM_DEVICES: None}
    if configuration.source != env.XRT_DEVICE_MAP:
        # A process without `XRT_TPU_CONFIG` would otherwise read the workers from these two.
        variables |= {env.XRT_DEVICE_MAP: None, env.XRT_WORKERS: None}
    if world.world_size == 1:
        # A single replica meets nobody, and the launcher starts no service for it.
        variables[env.XRT_MESH_SERVICE_ADDRESS] = None
    elif configuration.mesh_address:
        variables[env.XRT_MESH_SERVICE_ADDRESS] = configuration.mesh_address
    return variables


def _check_allowed(configuration: Configuration, count: int, where: str) -> None:
    every = configuration.devices_per_worker
    variable = env.XRT_DEVICE_MAP if configuration.source == env.XRT_DEVICE_MAP else env.TPU_NUM_DEVICES
    if count not in (1, every):
        allowed = "nprocs=1" if every == 1 else f"nprocs=1 or nprocs={every}"
        raise UsageError(
            f"{count} processes cannot share {every} core(s): a host starts one process, or one per core",
            where=where,
            fix=f"Write {allowed}, or omit it to use all cores; {variable} sets the number of cores.",
        )
    if count == 1 < every and configuration.hosts > 1:
        raise UsageError(
            f"one process cannot drive the {every} cores of a host in a job of {configuration.hosts} hosts",
            where=where,
            fix=f"Omit nprocs, or write nprocs={every}.",
        )


def _check_source(configuration: Configuration, where: str) -> None:
    """Refuse a source that describes the devices of a single process."""
    if configuration.source not in (env.XRT_DEVICE_MAP, env.TPU_NUM_DEVICES):
        return
    is_map = configuration.source == env.XRT_DEVICE_MAP
    workers = write_workers(configuration.workers) if is_map else "localservice;0;localhost:51011"
    each = f" and {env.TPU_NUM_DEVICES}={configuration.devices_per_worker}"
    raise UsageError(
        f"{configuration.source} describes the devices of one process, not of several",
        where=where,
        fix=f'Set {env.XRT_TPU_CONFIG}="{workers}"{each}, or write nprocs=1.',
    )
