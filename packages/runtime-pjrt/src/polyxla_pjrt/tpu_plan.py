"""The plan of a job on several TPU cores of this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polyxla import UsageError
from polyxla_pjrt import env, torchrun
from polyxla_pjrt.layout import Layout, Plan
from polyxla_pjrt.tpu.accelerators import Bounds, Shape
from polyxla_pjrt.tpu.cores import host_core, skip_metadata, this_slice
from polyxla_pjrt.tpu.slices import TpuSlice
from polyxla_pjrt.tpu.topology import process_environments


@dataclass(frozen=True)
class TpuPlan(Plan):
    """Where the replicas of a job run on this host's TPU cores; the slice's other hosts launch their own.

    Attributes:
        variables: the description of the slice, and the chip, for each process of this host.
        worker_id: this host's number in the slice.
    """

    variables: tuple[Mapping[str, str], ...] = ()
    worker_id: int = 0

    @property
    def is_bridged(self) -> bool:
        """False: torch_xla drives TPUs itself."""
        return False

    @property
    def first_process(self) -> int:
        """The number of this host's first process in the slice."""
        return self.worker_id * self.layout.processes

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

    def program_environment(self, cpu_count: int) -> dict[str, str]:
        """Return the variables for a program that launches the replicas."""
        return {env.PJRT_DEVICE: self.kind}

    def process_environments(self, environ: Mapping[str, str], cpu_count: int) -> list[dict[str, str]]:
        """Return the complete environment of each process of this host, over `environ`."""
        shared = {env.PJRT_DEVICE: self.kind, env.PJRT_LOCAL_PROCESS_COUNT: str(len(self.variables))}
        return [
            {**environ, **shared, **own, env.PJRT_LOCAL_PROCESS_RANK: str(rank)}
            for rank, own in enumerate(self.variables)
        ]


def plan_cores(environ: Mapping[str, str], devices: tuple[int, ...]) -> TpuPlan:
    """Plan a job on several of this host's cores: a process for each chip, a thread for each core.

    Raises:
        UsageError: these cores cannot be used together, or torchrun has started this process.
    """
    if torchrun.process_count(environ) is not None:
        raise UsageError(
            "torchrun has started this process, and a launch on TPU cores starts the processes itself",
            where=f"devices={list(devices)}",
            fix="Start the script once on each host, with python or polyxla run.",
        )
    tpu_slice = this_slice(environ)
    threads = tpu_slice.accelerator.threads_per_process
    chips = sorted({host_core(tpu_slice, device) // threads for device in devices})
    if len(chips) != tpu_slice.bounds.chips_per_host_count:
        bounds = _box(tpu_slice, chips)
        tpu_slice = replace(tpu_slice, bounds=bounds, worker_id=0, hostnames=("localhost",))
    if len(chips) * threads != len(devices):
        raise _not_together(devices, f"one process drives the {threads} cores of a chip: take both or none")
    variables = process_environments(
        tpu_slice.accelerator,
        worker_id=tpu_slice.worker_id,
        hostnames=tpu_slice.hostnames,
        bounds=tpu_slice.bounds,
        chips=chips,
    )
    return TpuPlan(
        "TPU",
        Layout(threads, len(chips), tpu_slice.bounds.host_count),
        variables=tuple(one | skip_metadata(tpu_slice) for one in variables),
        worker_id=tpu_slice.worker_id,
    )


def _box(tpu_slice: TpuSlice, chips: list[int]) -> Bounds:
    """Return the bounds of some chips of a host, which must form a box.

    Raises:
        UsageError: they form none, or the slice has other hosts, which would wait for the other chips.
    """
    if tpu_slice.bounds.host_count > 1:
        raise _not_together(
            chips, f"the slice's {tpu_slice.bounds.host_count} hosts must use all their chips"
        )
    coordinates = [_coordinates(chip, tpu_slice.bounds.chips_per_host) for chip in chips]
    corners = [(min(line), max(line)) for line in zip(*coordinates, strict=True)]
    x, y, z = (last - first + 1 for first, last in corners)
    if x * y * z != len(chips):
        raise _not_together(chips, "they are not neighbours that form a box")
    return Bounds((1, 1, 1), (x, y, z))


def _coordinates(chip: int, shape: Shape) -> Shape:
    """Return a chip's coordinates on its host; chips count along x first.

    Source: in torch_xla 2.9.0 the process with the n-th task id opens chip n, and libtpu counts task ids so.
    """
    rest, x = divmod(chip, shape[0])
    z, y = divmod(rest, shape[1])
    return x, y, z


def _not_together(which: Sequence[int], why: str) -> UsageError:
    return UsageError(
        f"the TPU chips {list(which)} cannot be used together: {why}",
        where="devices",
        fix="Leave devices out to use all of them, or write devices=[i] for one core.",
    )
