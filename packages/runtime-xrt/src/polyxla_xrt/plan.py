"""The plan of a job: each replica's core and each process's environment. Pure, except for free ports."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from polyxla import UsageError
from polyxla.plugin import LOCALHOST, Device, Place, World, free_ports, from_environ, pick_devices
from polyxla_xrt import env
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.config.configuration import Configuration, read_configuration
from polyxla_xrt.config.cores import all_cores, check_process_count, child_environment, child_world
from polyxla_xrt.config.credentials import absolute_files
from polyxla_xrt.config.workers import Worker

THREADS_PER_DEVICE = 4
"""Threads of torch_xla's pool for each device of a process: some of them block on others."""


@dataclass(frozen=True)
class NodePlan:
    """The replicas of a job on a TPU node: each has a core, and a process.

    Attributes:
        configuration: the workers and hosts.
        devices: the cores that are used, numbered across all workers of the job.
    """

    configuration: Configuration
    devices: tuple[int, ...]

    @property
    def worker(self) -> Worker:
        """The worker that this host drives. Only valid if this host knows the list of workers."""
        return self.configuration.workers[self.configuration.host_index]

    @property
    def address(self) -> str | None:
        """``host:port`` of this host's worker; None if this host does not know the list of workers."""
        return self.worker.address if self.configuration.workers else None

    @property
    def cores(self) -> int:
        """Number of cores that this host drives, with a process each. The worker chooses the cores."""
        return len(self.devices) // self.configuration.hosts

    def world(self, process: int) -> World:
        """Return the world of the replica in one of this host's processes."""
        return child_world(self.configuration, process, self.cores)

    def assignment(self, process: int, address: str, job: str) -> Assignment:
        """Return the assignment of one of this host's processes.

        Args:
            process: the index of the process on this host.
            address: ``host:port`` of this host's worker.
            job: the worker's key for the job.
        """
        world, kind = self.world(process), self.configuration.kind
        # The index counts the cores that the worker grants to the job, whichever they are.
        own = (process,)
        return Assignment(
            address, job, own, kind, world.ordinal, world.world_size, world.ordinal, world.world_size
        )

    def program_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a process that drives all cores of this host itself."""
        host = self.configuration.host_index
        return _device_variables(self.cores) | _slice(len(self.devices), host) | absolute_files(environ)

    def process_environments(
        self, environ: Mapping[str, str], address: str, job: str, mesh: str
    ) -> list[dict[str, str]]:
        """Return the whole environment of each of this host's processes.

        Args:
            environ: the job's environment.
            address: ``host:port`` of this host's worker.
            job: the worker's key for the job.
            mesh: ``host:port`` of the mesh service; empty for one replica.
        """
        services = self._store(environ) | ({env.XRT_MESH_SERVICE_ADDRESS: mesh} if mesh else {})
        # `_device_variables(1)` overrides those in `program_environment`: a process drives one device, not
        # all of the host.
        common = {**environ, **self.program_environment(environ), **_device_variables(1), **services}
        return [
            _without_none(
                common
                | child_environment(self.configuration, process, self.cores)
                | {env.POLYXLA_XRT_ASSIGNMENT: self.assignment(process, address, job).write()}
            )
            for process in range(self.cores)
        ]

    def _store(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the address of torch.distributed's store; torch_xla uses one fixed port for all jobs."""
        # The processes of other hosts could not learn a port that this host chooses, and a user's own port
        # stays.
        if self.configuration.hosts > 1 or environ.get(env.MASTER_PORT):
            return {}
        return {env.MASTER_ADDR: LOCALHOST, env.MASTER_PORT: str(free_ports(1)[0])}


NodePlace: TypeAlias = Place[NodePlan]
"""The place of one replica; its process is numbered on its host."""


def plan_for(configuration: Configuration, devices: Sequence[int]) -> NodePlan:
    """Return the plan that uses some cores of a configuration.

    Args:
        configuration: the workers and hosts.
        devices: the cores, numbered across all workers of the job.

    Raises:
        UsageError: several hosts would use only some of their cores, or have no mesh service.
    """
    count = len(all_cores(configuration))
    # `child_world` assumes equally many replicas on every host, and a subset of the cores need not be
    # distributed equally.
    if configuration.hosts > 1 and len(devices) != count:
        raise UsageError(
            f"a job of {configuration.hosts} hosts must use all {count} cores, not {len(devices)} of them",
            where="devices",
            fix="Omit devices to use all cores.",
        )
    check_process_count(configuration, len(devices) // configuration.hosts, "devices")
    return NodePlan(_with_port(configuration), tuple(devices))


def _with_port(configuration: Configuration) -> Configuration:
    """Choose the port of a worker that this host starts, if nothing but its number of cores is known."""
    # The worker and its clients must know the same port before it listens, so it cannot choose one itself.
    if not configuration.starts_service or any(worker.port for worker in configuration.workers):
        return configuration
    (worker,) = configuration.workers
    return replace(configuration, workers=(replace(worker, port=free_ports(1)[0]),))


def requested_plan(configuration: Configuration, environ: Mapping[str, str]) -> NodePlan:
    """Return the plan that the environment requests, as for a program that passes no ``devices``.

    Args:
        configuration: the workers and hosts.
        environ: the environment, with `POLYXLA_DEVICES`.

    Raises:
        UsageError: the requested devices do not exist, or cannot be used.
    """
    requested = from_environ(environ).devices
    return plan_for(configuration, pick_devices(requested, "xrt", found_devices(configuration)))


def found_devices(configuration: Configuration) -> tuple[Device, ...]:
    """Return every core of a job, as discovery reports them."""
    return tuple(
        Device(core.ordinal, core.kind, f"core {core.index} of {core.worker}", core.worker.task)
        for core in all_cores(configuration)
    )


def configured_plan(environ: Mapping[str, str]) -> NodePlan:
    """Return the plan of an environment that describes a TPU node.

    Raises:
        UsageError: the requested cores cannot be used.
    """
    configuration = read_configuration(environ)
    assert configuration is not None, "this runtime is chosen by a configuration"
    return requested_plan(configuration, environ)


def _device_variables(devices: int) -> dict[str, str]:
    threads = max(os.cpu_count() or 1, THREADS_PER_DEVICE * devices)
    return {env.PJRT_DEVICE: env.NODE, env.XLA_THREAD_POOL_SIZE: str(threads)}


def _slice(count: int, host: int) -> dict[str, str]:
    """Return variables that describe the cores as a TPU slice, so that torch_xla asks no metadata server."""
    return {
        env.TPU_SKIP_MDS_QUERY: "1",
        env.TPU_ACCELERATOR_TYPE: f"v3-{count}",
        env.TPU_PROCESS_BOUNDS: "1,1,1",
        env.TPU_CHIPS_PER_PROCESS_BOUNDS: "2,2,1",
        env.TPU_WORKER_ID: str(host),
        env.TPU_WORKER_HOSTNAMES: "localhost",
    }


def _without_none(variables: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if value is not None}
