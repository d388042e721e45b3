"""Where a job's replicas are, and what each process must be told. Pure, but for a search for ports."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyxla import Device, UsageError, World
from polyxla.env import from_environ
from polyxla.launcher.ports import LOCALHOST, free_ports
from polyxla.plugins.device_request import pick_devices
from polyxla_xrt import env
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.config.configuration import Configuration, read
from polyxla_xrt.config.cores import check_several, child_environment, child_world, cores
from polyxla_xrt.config.workers import Worker

THREADS_PER_DEVICE = 4
"""Threads of torch_xla's pool for each device of a process: some of them wait for others."""


@dataclass(frozen=True)
class Plan:
    """A job's replicas, each on a core and in a process of its own.

    Attributes:
        configuration: what the environment says of the workers.
        devices: the cores that are used, by their number among all of the job's workers.
    """

    configuration: Configuration
    devices: tuple[int, ...]

    @property
    def worker(self) -> Worker:
        """The worker that this host drives; only where the list of workers is known."""
        return self.configuration.workers[self.configuration.host_index]

    @property
    def address(self) -> str | None:
        """Where this host's worker is; None where the list of workers is not known."""
        return self.worker.address if self.configuration.workers else None

    @property
    def cores(self) -> int:
        """How many cores this host drives, a process each; the worker says which of its own they are."""
        return len(self.devices) // self.configuration.hosts

    def world(self, process: int) -> World:
        """Return where the replica of one of this host's processes stands."""
        return child_world(self.configuration, process, self.cores)

    def assignment(self, process: int, address: str, job: str) -> Assignment:
        """Return what one of this host's processes must know of its worker."""
        world, kind = self.world(process), self.configuration.kind
        # Of the cores that the worker gives to the job, whichever they are.
        own = (process,)
        return Assignment(
            address, job, own, kind, world.ordinal, world.world_size, world.ordinal, world.world_size
        )

    def program_environment(self) -> dict[str, str]:
        """Return what a process needs in its environment that drives all of this host's cores itself."""
        return _device_variables(self.cores) | _slice(len(self.devices), self.configuration.host_index)

    def process_environments(
        self, environ: Mapping[str, str], address: str, job: str, mesh: str
    ) -> list[dict[str, str]]:
        """Return the whole environment of each of this host's processes, over `environ`.

        Args:
            environ: the job's.
            address: where this host's worker is.
            job: the key that it gave.
            mesh: where processes meet; empty for one replica.
        """
        meeting = self._store(environ) | ({env.XRT_MESH_SERVICE_ADDRESS: mesh} if mesh else {})
        alike = {**environ, **self.program_environment(), **_device_variables(1), **meeting}
        return [
            _without_none(
                alike
                | child_environment(self.configuration, process, self.cores)
                | {env.POLYXLA_XRT_ASSIGNMENT: self.assignment(process, address, job).write()}
            )
            for process in range(self.cores)
        ]

    def _store(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Say where torch.distributed's processes meet; torch_xla's own choice is one port for all jobs."""
        if self.configuration.hosts > 1 or environ.get(env.MASTER_PORT):
            return {}
        return {env.MASTER_ADDR: LOCALHOST, env.MASTER_PORT: str(free_ports(1)[0])}


@dataclass(frozen=True)
class Place:
    """Which replica of a plan one is.

    Attributes:
        plan: where all replicas are.
        process: the number of its process on this host.
    """

    plan: Plan
    process: int


def plan_for(configuration: Configuration, devices: Sequence[int]) -> Plan:
    """Lay out replicas on cores.

    Raises:
        UsageError: some cores of several hosts, or the hosts do not know where to meet.
    """
    count = len(cores(configuration))
    if configuration.hosts > 1 and len(devices) != count:
        raise UsageError(
            f"{len(devices)} of {count} cores cannot be used by themselves where {configuration.hosts} hosts "
            "work together",
            where="devices",
            fix="Leave devices out, for all.",
        )
    check_several(configuration, len(devices) // configuration.hosts, "devices")
    return Plan(configuration, tuple(devices))


def requested_plan(configuration: Configuration, environ: Mapping[str, str]) -> Plan:
    """Return what the environment alone asks for.

    Raises:
        UsageError: it asks for what cannot be.
    """
    asked = from_environ(environ).devices
    return plan_for(configuration, pick_devices(asked, "xrt", found_devices(configuration)))


def found_devices(configuration: Configuration) -> tuple[Device, ...]:
    """Return every core of a job, as core picks among them."""
    return tuple(
        Device(core.ordinal, core.kind, f"core {core.index} of {core.worker}", core.worker.task)
        for core in cores(configuration)
    )


def configured_plan(environ: Mapping[str, str]) -> Plan:
    """Return the plan of an environment that describes a TPU node.

    Raises:
        UsageError: the cores that it asks for cannot be used.
    """
    configuration = read(environ)
    assert configuration is not None, "this runtime is chosen by a configuration"
    return requested_plan(configuration, environ)


def _device_variables(devices: int) -> dict[str, str]:
    threads = max(os.cpu_count() or 1, THREADS_PER_DEVICE * devices)
    return {env.PJRT_DEVICE: env.NODE, env.XLA_THREAD_POOL_SIZE: str(threads)}


def _slice(count: int, host: int) -> dict[str, str]:
    """Describe the worker's cores in a TPU's terms, so that nothing queries the metadata server."""
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
