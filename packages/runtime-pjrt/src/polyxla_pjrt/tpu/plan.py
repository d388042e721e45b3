"""The TPU part of discovery: which cores are here, and what one replica's process needs."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polyxla import Device, Discovery, Setting, UsageError
from polyxla_pjrt import env, torchrun
from polyxla_pjrt.layout import Layout, Plan
from polyxla_pjrt.tpu.accelerators import AcceleratorType, Bounds, Shape
from polyxla_pjrt.tpu.chips import Chip
from polyxla_pjrt.tpu.metadata import MetadataClient
from polyxla_pjrt.tpu.slices import Slice, read_slice
from polyxla_pjrt.tpu.topology import process_environments, single_core_environment


def with_devices(bare: Discovery, environ: Mapping[str, str], chips: tuple[Chip, ...]) -> Discovery:
    """Complete a discovery with the cores of this host.

    Raises:
        UsageError: a TPU is asked for that is not here, or its topology cannot be read.
    """
    if not chips:
        raise UsageError(
            "no TPU chip is attached to this machine",
            fix=f"Run on a TPU VM, or set {env.PJRT_DEVICE}=CPU to train on this machine's CPU.",
        )
    if not _has_libtpu(environ):
        raise UsageError(
            "TPU chips are attached, but libtpu is not installed",
            fix="Install it: pip install 'torch_xla[tpu]==2.9.0'",
        )
    slice_ = this_slice(environ)
    variables = {**bare.variables, env.TPU_ACCELERATOR_TYPE: Setting(slice_.accelerator.name, slice_.origin)}
    return replace(
        bare,
        devices=_cores(slice_, chips),
        host_count=slice_.accelerator.hosts,
        topology=slice_.accelerator.name,
        variables=variables,
        notes=tuple(f"{name} has no effect: the metadata server is asked" for name in slice_.ignored),
    )


def core_environment(environ: Mapping[str, str], device: int) -> dict[str, str]:
    """Return the variables of a process that uses one core of this host and nothing else.

    Raises:
        UsageError: ``polyxla run`` has prepared this process for another core.
    """
    if prepared := environ.get(env.POLYXLA_PJRT_DEVICE):
        _check_same(int(prepared), device)
        return {}
    slice_ = this_slice(environ)
    # The type's own bounds: the slice's may speak of fewer chips than the host has.
    accelerator = AcceleratorType.parse(slice_.accelerator.name, slice_.origin)
    variables, local_device = single_core_environment(_core_of(slice_, device), accelerator)
    return {
        env.PJRT_DEVICE: "TPU",
        **variables,
        **_unasked(slice_),
        env.POLYXLA_PJRT_DEVICE: str(device),
        env.POLYXLA_PJRT_LOCAL_DEVICE: str(local_device),
    }


@dataclass(frozen=True)
class TpuPlan(Plan):
    """What a job on several of this host's TPU cores runs on; the slice's other hosts launch theirs.

    Attributes:
        variables: what each process of this host is told about the slice, and its chip.
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

    def whole(self, cpu_count: int) -> dict[str, str]:
        """Return what a program finds in its environment that launches them."""
        return {env.PJRT_DEVICE: self.kind}

    def each(self, environ: Mapping[str, str], cpu_count: int) -> list[dict[str, str]]:
        """Return the whole environment of each process of this host, over `environ`."""
        own = {env.PJRT_DEVICE: self.kind, env.PJRT_LOCAL_PROCESS_COUNT: str(len(self.variables))}
        return [
            {**environ, **own, **told, env.PJRT_LOCAL_PROCESS_RANK: str(rank)}
            for rank, told in enumerate(self.variables)
        ]


def plan(environ: Mapping[str, str], devices: tuple[int, ...]) -> TpuPlan:
    """Return what several of this host's cores are used by: a process each chip, a thread each core of it.

    Raises:
        UsageError: these cores cannot be used together, or torchrun has started this process.
    """
    if torchrun.process_count(environ) is not None:
        raise UsageError(
            "torchrun has started this process, and a launch on TPU cores starts the processes itself",
            where=f"devices={list(devices)}",
            fix="Start the script once on each host, with python or polyxla run.",
        )
    slice_ = this_slice(environ)
    threads = slice_.accelerator.threads_per_process
    chips = sorted({_core_of(slice_, device) // threads for device in devices})
    if len(chips) != slice_.bounds.chips_per_host_count:
        bounds = _part(slice_, chips)
        slice_ = replace(slice_, bounds=bounds, worker_id=0, hostnames=("localhost",))
    if len(chips) * threads != len(devices):
        raise _not_together(devices, f"each chip's {threads} cores are one process's: take both or none")
    variables = process_environments(
        slice_.accelerator,
        worker_id=slice_.worker_id,
        hostnames=slice_.hostnames,
        bounds=slice_.bounds,
        chips=chips,
    )
    return TpuPlan(
        "TPU",
        Layout(threads, len(chips), slice_.bounds.host_count),
        variables=tuple(one | _unasked(slice_) for one in variables),
        worker_id=slice_.worker_id,
    )


def _unasked(slice_: Slice) -> dict[str, str]:
    """Return what keeps torch_xla from asking the metadata server again, where it had nothing to say."""
    return {env.TPU_SKIP_MDS_QUERY: "1"} if slice_.origin == "environment" else {}


def _part(slice_: Slice, chips: list[int]) -> Bounds:
    """Return the arrangement of some chips of a host, which must form a box, on their own.

    Raises:
        UsageError: they form none, or the slice has other hosts, which would wait for the rest.
    """
    if slice_.bounds.host_count > 1:
        raise _not_together(chips, f"the slice's {slice_.bounds.host_count} hosts must use all their chips")
    places = [_place(chip, slice_.bounds.chips_per_host) for chip in chips]
    corners = [(min(line), max(line)) for line in zip(*places, strict=True)]
    x, y, z = (last - first + 1 for first, last in corners)
    if x * y * z != len(chips):
        raise _not_together(chips, "they are not neighbours that form a box")
    return Bounds((1, 1, 1), (x, y, z))


def _place(chip: int, shape: Shape) -> Shape:
    """Return where a chip is on its host, counted along x first.

    Source: torch_xla 2.9.0 lets the process with the n-th task id, which libtpu counts so, open chip n.
    """
    rest, x = divmod(chip, shape[0])
    z, y = divmod(rest, shape[1])
    return x, y, z


def _not_together(which: Sequence[int], why: str) -> UsageError:
    return UsageError(
        f"the TPU chips {list(which)} cannot be used together: {why}",
        where="devices",
        fix="Leave devices out for all of them, or write devices=[i] for one core.",
    )


def _core_of(slice_: Slice, device: int) -> int:
    """Return the core's number on its host: devices are counted over the visible chips only."""
    if slice_.visible_chips is None:
        return device
    chip, core = divmod(device, slice_.accelerator.threads_per_process)
    return slice_.visible_chips[chip] * slice_.accelerator.threads_per_process + core


def _check_same(prepared: int, device: int) -> None:
    if prepared != device:
        raise UsageError(
            f"this process was prepared for device {prepared}, and device {device} is asked for in the code",
            where=f"devices=[{device}]",
            fix=f"Leave devices= out of the code, or run it with polyxla run --devices '[{device}]'.",
        )


def this_slice(environ: Mapping[str, str]) -> Slice:
    """Return the slice this host belongs to.

    Raises:
        UsageError: neither the environment nor the metadata server describes it.
    """
    slice_ = read_slice(environ, _metadata(environ.get(env.GCE_METADATA_HOST)))
    if slice_ is None:
        raise UsageError(
            "TPU chips are attached, but neither the environment nor the metadata server says what they "
            "are part of",
            fix=f"Set {env.TPU_SKIP_MDS_QUERY}=1 and {env.TPU_ACCELERATOR_TYPE}=v4-8 (your type).",
        )
    return slice_


@functools.cache
def _metadata(host: str | None) -> MetadataClient:
    return MetadataClient.from_environ({env.GCE_METADATA_HOST: host} if host else {})


def _cores(slice_: Slice, chips: tuple[Chip, ...]) -> tuple[Device, ...]:
    visible = range(len(chips)) if slice_.visible_chips is None else slice_.visible_chips
    places = [(chip, core) for chip in visible for core in range(slice_.accelerator.threads_per_process)]
    return tuple(
        Device(index, "TPU", f"{slice_.accelerator.name} chip {chip} core {core}", slice_.worker_id)
        for index, (chip, core) in enumerate(places)
    )


def _has_libtpu(environ: Mapping[str, str]) -> bool:
    # The two ways torch_xla itself finds it. Source: torch_xla/__init__.py, v2.9.0.
    return bool(environ.get(env.TPU_LIBRARY_PATH)) or importlib.util.find_spec("libtpu") is not None
