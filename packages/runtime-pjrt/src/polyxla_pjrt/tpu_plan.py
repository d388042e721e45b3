"""The plan of a job on several TPU cores of this host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyxla import UsageError
from polyxla.plugin import (
    POLYXLA_LIBTPU_SLICE,
    POLYXLA_SECRET,
    ChipPlan,
    Layout,
    host_environment,
    plan_chips,
    process_environments,
    skip_metadata,
    tpu_env,
    with_secret,
)
from polyxla_pjrt import env
from polyxla_pjrt.cores import this_slice
from polyxla_pjrt.layout import Plan, thread_pools


@dataclass(frozen=True)
class TpuPlan(ChipPlan, Plan):
    """Where the replicas of a job run on TPU cores, as torch_xla's own launch would start them."""

    @property
    def is_bridged(self) -> bool:
        """Whether the TPU is an emulated one; torch_xla drives both in the same way."""
        return self.emulated is not None

    def with_own_processes(self) -> TpuPlan:
        """Return this plan if each replica has a process of its own.

        Raises:
            UsageError: the cores of a chip share a process.
        """
        if self.layout.threads > 1:
            raise UsageError(
                f"the {self.layout.threads} cores of a chip are replicas of one process, so a program cannot "
                "run once in each",
                where="--each",
                fix="Launch the replicas in the program, by torch_xla.launch or polyxla.launch.",
            )
        return self

    def program_environment(self, environ: Mapping[str, str], cpu_count: int) -> dict[str, str]:
        """Return the variables, over `environ`, for a program that launches the replicas.

        It may use the devices itself: then all chips of its host belong to its process, and an SPMD program
        has those of the slice's other hosts, too.
        """
        device = {env.PJRT_DEVICE: self.kind}
        if self.emulated is None:
            return device
        pools = thread_pools(Layout(self.layout.replicas), cpu_count)
        devices = self.chips_of(self.tpu_slice.worker_id, self.emulated.devices(environ))
        return device | pools | self.emulated.library_environment(devices) | self._slice_environment(environ)

    def _slice_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        if self.emulated is None or self.emulated.host is None or self.layout.hosts == 1:
            return {}
        slice_, bounds = self.tpu_slice, self.tpu_slice.bounds
        learned = host_environment(bounds, slice_.worker_id, slice_.hostnames)
        return {
            POLYXLA_LIBTPU_SLICE: " ".join(f"{name}={value}" for name, value in learned.items()),
            POLYXLA_SECRET: with_secret(environ, self.layout.hosts)[POLYXLA_SECRET],
        }

    def meeting(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return where the slice's processes meet; emulated hosts get addresses of this machine."""
        own = self._own_environments(self.tpu_slice.worker_id)
        if self.emulated is None:
            return {tpu_env.TPU_PROCESS_ADDRESSES: own[0][tpu_env.TPU_PROCESS_ADDRESSES]}
        addresses = self.addresses([one[tpu_env.TPU_PROCESS_PORT] for one in own])
        return {tpu_env.TPU_PROCESS_ADDRESSES: addresses, **self.emulated_meeting(environ)}

    def process_environment(self, process: int, cpu_count: int, meeting: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one process: those that libtpu reads, and those of torch_xla's launch."""
        host, rank = divmod(process, self.layout.processes)
        return {
            env.PJRT_DEVICE: self.kind,
            **self._local_variables(process),
            **self._own_environments(host)[rank],
            **skip_metadata(self.tpu_slice),
            **meeting,
            **self._emulated_environment(host, cpu_count, meeting),
        }

    def _own_environments(self, host: int) -> tuple[dict[str, str], ...]:
        """Return what libtpu reads in each process of a host."""
        return process_environments(
            self.tpu_slice.accelerator,
            worker_id=host,
            hostnames=self.tpu_slice.hostnames,
            bounds=self.tpu_slice.bounds,
            chips=self.chips,
        )

    def _emulated_environment(self, host: int, cpu_count: int, meeting: Mapping[str, str]) -> dict[str, str]:
        if self.emulated is None:
            return {}
        return thread_pools(self.layout, cpu_count) | self.emulated_host(host, meeting)


def plan_cores(environ: Mapping[str, str], devices: tuple[int, ...]) -> TpuPlan:
    """Plan a job on several of this host's cores: a process for each chip, a thread for each core.

    Raises:
        UsageError: these cores cannot be used together.
    """
    return TpuPlan(*plan_chips(environ, this_slice(environ), devices))
