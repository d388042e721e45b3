"""The processes of a job: which device each drives, its numbers, and what it must find in its environment.

Pure functions over a `Configuration`; the parent's environment is never written.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyxla import UsageError, World
from polyxla_xrt import env
from polyxla_xrt.config.configuration import Configuration
from polyxla_xrt.config.device_map import Kind
from polyxla_xrt.config.workers import WorkerId, write_workers


@dataclass(frozen=True)
class Core:
    """A device of a job.

    Attributes:
        kind: ``TPU``, unless a device map says otherwise.
        ordinal: its number among all of its kind.
        worker: the worker that has it; its task is the number of the host that drives it.
        index: its number within the worker.
    """

    kind: Kind
    ordinal: int
    worker: WorkerId
    index: int

    @property
    def name(self) -> str:
        """What XRT calls it, such as ``TPU:3``."""
        return f"{self.kind}:{self.ordinal}"


def cores(configuration: Configuration) -> tuple[Core, ...]:
    """Return every device of a job: numbers go on from worker to worker, in the order of their list.

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
        nprocs: what the caller of ``spawn`` asks for; None for all.

    Raises:
        UsageError: it is neither 1 nor all, or this configuration does not allow so many.
    """
    every = configuration.devices_per_worker
    count = every if nprocs is None else nprocs
    where = "nprocs" if nprocs is None else f"nprocs={nprocs}"
    _check_allowed(configuration, count, where)
    check_several(configuration, count, where)
    return count


def check_several(configuration: Configuration, count: int, where: str) -> None:
    """Check that processes can be started on each of this host's cores that is used.

    Args:
        configuration: the job's.
        count: how many, on this host.
        where: who asks for so many, to be named in the error.

    Raises:
        UsageError: the configuration describes the devices of one process, or hosts do not know each other.
    """
    if count > 1:
        _check_source(configuration, where)
    if configuration.hosts > 1 and configuration.mesh_address is None:
        raise UsageError(
            f"{configuration.hosts} hosts do not know where to meet",
            where=f"{env.XRT_MESH_SERVICE_ADDRESS} is unset",
            fix=f"Set {env.XRT_MESH_SERVICE_ADDRESS}=HOST:8477 on all of them, HOST being that of task 0.",
        )


def child_world(configuration: Configuration, index: int, count: int) -> World:
    """Return the numbers of a process of this host; each has one replica.

    Args:
        configuration: the job's.
        index: the process's number on this host, ``0 <= index < count``.
        count: how many processes each host has.

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
    """Return what changes in the environment of a process of this host; None removes a variable.

    Ordinal 0 alone keeps the description of the workers; the mesh service tells it to the others. Where
    `Configuration.mesh_address` is None the launcher adds the address it has chosen, if it is not 1 process.
    The arguments and errors are those of `child_world`. Source: torch_xla 1.13, xla_multiprocessing.py.
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
        # They would describe the workers wherever the better description has been removed.
        variables |= {env.XRT_DEVICE_MAP: None, env.XRT_WORKERS: None}
    if world.world_size == 1:
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
            f"{count} processes cannot share {every} core(s): a host starts one, or one for each core",
            where=where,
            fix=f"Write {allowed}, or nothing for all; {variable} says how many cores there are.",
        )
    if count == 1 < every and configuration.hosts > 1:
        raise UsageError(
            f"one process cannot stand for the {every} cores of a host where {configuration.hosts} hosts "
            "work together",
            where=where,
            fix=f"Leave nprocs out, or write nprocs={every}.",
        )


def _check_source(configuration: Configuration, where: str) -> None:
    """Refuse what describes the devices of one process, and would do so in each of several."""
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
