"""The slice that this host belongs to, as variables or the metadata server describe it, and its cores."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polyxla.contracts.discovery import Device
from polyxla.errors import UsageError
from polyxla.tpu import env, parts
from polyxla.tpu.accelerators import AcceleratorType, Bounds, Shape, parse_shape
from polyxla.tpu.chips import PCI_ROOT, AttachedChip, attached_chips
from polyxla.tpu.emulated import EmulatedTpu
from polyxla.tpu.megascale import Megascale
from polyxla.tpu.metadata import MetadataClient, MetadataKeyError, MetadataUnreachableError
from polyxla.tpu.parts import Value, from_variables
from polyxla.tpu.topology import check_workers, join, no_such_worker

Origin = Literal["environment", "metadata server"]

_DESCRIPTION = (
    env.TPU_ACCELERATOR_TYPE,
    *parts.HOSTS,
    *parts.CHIPS,
    env.CLOUD_TPU_TASK_ID,
    env.TPU_WORKER_ID,
    env.TPU_WORKER_HOSTNAMES,
)


@dataclass(frozen=True)
class TpuSlice:
    """A TPU slice as one of its hosts sees it, or the part of a host that variables select.

    Attributes:
        accelerator: its type, with `bounds` as its bounds.
        worker_id: this host's number, ``0 <= worker_id < bounds.host_count``.
        hostnames: all hosts in the order of their worker ids.
        bounds: how its hosts and chips are arranged; those of the part if variables select one.
        host: how all chips of this host are arranged, selected or not.
        origin: the source of the description.
        visible_chips: the chips of this host to use, if a variable selects them; else None.
        ignored: variables that are set and describe a slice, but were not read.
        megascale: its place among the slices of the job; None for a job on this one.
    """

    accelerator: AcceleratorType
    worker_id: int
    hostnames: tuple[str, ...]
    bounds: Bounds
    host: Shape
    origin: Origin
    visible_chips: tuple[int, ...] | None = None
    ignored: tuple[str, ...] = ()
    megascale: Megascale | None = None

    @property
    def slices(self) -> int:
        """Number of slices of the job."""
        return self.megascale.slices if self.megascale else 1

    @property
    def topology(self) -> str:
        """The name of its type, after the number of the job's slices if there are several."""
        return self.accelerator.name_of(self.slices)

    @property
    def host_count(self) -> int:
        """Number of hosts of the job, on all its slices."""
        return self.slices * self.bounds.host_count

    @property
    def host_index(self) -> int:
        """This host's number among them: they count through the slices."""
        slice_id = self.megascale.slice_id if self.megascale else 0
        return slice_id * self.bounds.host_count + self.worker_id


def read_slice(environ: Mapping[str, str], metadata: MetadataClient) -> TpuSlice | None:
    """Read the description of this host's slice.

    With `TPU_SKIP_MDS_QUERY` the variables describe it, otherwise the metadata server, or again the variables
    if the server cannot be reached or describes no TPU. May block as long as `metadata` does.

    Returns:
        The slice; None if neither describes one.

    Raises:
        UsageError: a value is missing or invalid, or contradicts another.
        MetadataError: the metadata server's answer cannot be used.
    """
    # In torch_xla's order, so that both see the same slice.
    if _skips_metadata(environ):
        return _from_environ(environ)
    described = _from_metadata(metadata, environ)
    if described is not None:
        return _make_slice(described, "metadata server", environ)
    return _from_environ(environ) if environ.get(env.TPU_ACCELERATOR_TYPE) else None


@dataclass(frozen=True)
class _Description:
    """A source's description of the slice; None for each value that is missing."""

    accelerator: Value | None
    hosts: Value | None
    chips_per_host: Value | None
    worker_id: Value | None
    hostnames: Value | None
    megascale: Megascale | None


def _skips_metadata(environ: Mapping[str, str]) -> bool:
    text = environ.get(env.TPU_SKIP_MDS_QUERY, "")
    if text.strip().lower() in ("0", "false", "no", "off"):
        raise UsageError(
            f"{env.TPU_SKIP_MDS_QUERY} counts as set with any text, so {text!r} does not switch it off",
            where=f"{env.TPU_SKIP_MDS_QUERY}={text}",
            fix=f"Unset it to ask the metadata server, or write {env.TPU_SKIP_MDS_QUERY}=1 to skip it.",
        )
    return bool(text)


def _from_environ(environ: Mapping[str, str]) -> TpuSlice:
    described = _Description(
        accelerator=from_variables(environ, env.TPU_ACCELERATOR_TYPE),
        hosts=from_variables(environ, *parts.HOSTS),
        chips_per_host=from_variables(environ, *parts.CHIPS),
        worker_id=from_variables(environ, env.CLOUD_TPU_TASK_ID, env.TPU_WORKER_ID),
        hostnames=from_variables(environ, env.TPU_WORKER_HOSTNAMES),
        megascale=Megascale.read(environ),
    )
    return _make_slice(described, "environment", environ)


def _from_metadata(metadata: MetadataClient, environ: Mapping[str, str]) -> _Description | None:
    """Ask the metadata server; None if it cannot be reached or describes no TPU.

    Source: the keys of ``tpu-env`` as printed on a v4-256, and those torch_xla 2.9.0 reads. For the slices,
        ``jax._src.clusters.cloud_tpu_cluster`` looks in the environment, then in ``tpu-env``.
    """
    try:
        tpu_env = metadata.tpu_env()
    # Without a server, this machine is not on Google Cloud; without the key, it has no TPU there. Every other
    # error is reported: the job would otherwise run on another slice than its own.
    except (MetadataUnreachableError, MetadataKeyError):
        return None

    def value(*keys: str) -> Value | None:
        present = (key for key in keys if tpu_env.get(key))
        return next((Value(tpu_env[key], f"{key} in the metadata server's tpu-env") for key in present), None)

    return _Description(
        accelerator=value("ACCELERATOR_TYPE") or _attribute(metadata, "accelerator-type"),
        hosts=value("TPU_PROCESS_BOUNDS", "HOST_BOUNDS"),
        chips_per_host=value("TPU_CHIPS_PER_PROCESS_BOUNDS", "CHIPS_PER_HOST_BOUNDS"),
        worker_id=value("WORKER_ID"),
        hostnames=_endpoints(metadata),
        megascale=Megascale.read(environ) or Megascale.read(tpu_env, " in the metadata server's tpu-env"),
    )


def _attribute(metadata: MetadataClient, key: str) -> Value:
    return Value(metadata.attribute(key), f"the metadata server's {key}")


def _endpoints(metadata: MetadataClient) -> Value | None:
    try:
        addresses = metadata.worker_addresses()
    except MetadataKeyError:
        return None
    return Value(",".join(addresses), "the metadata server's worker-network-endpoints")


def _make_slice(described: _Description, origin: Origin, environ: Mapping[str, str]) -> TpuSlice:
    if described.accelerator is None:
        raise UsageError(
            "the slice's type is not given",
            where=f"{env.TPU_SKIP_MDS_QUERY}={environ.get(env.TPU_SKIP_MDS_QUERY, '')}",
            fix=f"Set {env.TPU_ACCELERATOR_TYPE}, such as v4-8, or unset {env.TPU_SKIP_MDS_QUERY} "
            "to ask the metadata server.",
        )
    accelerator = AcceleratorType.parse(*described.accelerator)
    whole = _bounds(accelerator, described, origin)
    hostnames = _hostnames(whole, described)
    worker_id = _worker_id(whole, described)
    named = described.hostnames.where if described.hostnames else f"{env.TPU_WORKER_HOSTNAMES} is unset"
    check_workers(whole, worker_id, hostnames, where=named)
    host = whole.chips_per_host
    if origin == "environment":
        # The variables may describe a part of the host. The type gives the number of all its chips.
        host = max(host, accelerator.bounds.chips_per_host, key=math.prod)
    part = parts.read_part(environ, accelerator.generation, whole, host)
    # A part of a host is a slice of its own: it has one host, with the number 0.
    is_alone = part.bounds.host_count < whole.host_count
    given = [name for name in _DESCRIPTION if environ.get(name)] if origin != "environment" else []
    return TpuSlice(
        accelerator=dataclasses.replace(accelerator, bounds=part.bounds),
        worker_id=0 if is_alone else worker_id,
        hostnames=("localhost",) if is_alone else hostnames,
        bounds=part.bounds,
        host=host,
        origin=origin,
        visible_chips=part.chips,
        ignored=tuple(name for name in given if name not in part.variables),
        megascale=described.megascale if part.bounds.chip_count == whole.chip_count else None,
    )


def _bounds(accelerator: AcceleratorType, described: _Description, origin: Origin) -> Bounds:
    # torch_xla uses only its table for v2 and v3, whose metadata had no bounds when that code was written.
    if origin == "metadata server" and accelerator.generation in ("v2", "v3"):
        return accelerator.bounds
    hosts, chips = accelerator.bounds.hosts, accelerator.bounds.chips_per_host
    if described.hosts:
        hosts = parse_shape(*described.hosts)
    if described.chips_per_host:
        chips = parse_shape(*described.chips_per_host)
    bounds = Bounds(hosts, chips)
    if bounds.chip_count > accelerator.chips:
        sources = [value.where for value in (described.hosts, described.chips_per_host) if value]
        raise UsageError(
            f"hosts {join(hosts)} with chips {join(chips)} each make {bounds.chip_count} chips, "
            f"but {accelerator.name} has {accelerator.chips}",
            where=" and ".join(sources),
            fix=f"Unset them, or write {join(accelerator.bounds.hosts)} and "
            f"{join(accelerator.bounds.chips_per_host)}.",
        )
    return bounds


def _hostnames(bounds: Bounds, described: _Description) -> tuple[str, ...]:
    if described.hostnames is None:
        return ("localhost",) if bounds.host_count == 1 else ()
    return tuple(name.strip() for name in described.hostnames.text.split(",") if name.strip())


def _worker_id(bounds: Bounds, described: _Description) -> int:
    if described.worker_id is None and bounds.host_count == 1:
        return 0
    if described.worker_id is None:
        raise no_such_worker("", bounds.host_count, f"{env.TPU_WORKER_ID} is unset")
    text = described.worker_id.text.strip()
    # The length is checked first: Python refuses to convert a number of thousands of digits.
    if not text.isdecimal() or len(text) > 6 or int(text) >= bounds.host_count:
        raise no_such_worker(text, bounds.host_count, described.worker_id.where)
    return int(text)


def host_chips(environ: Mapping[str, str], pci_root: Path = PCI_ROOT) -> tuple[AttachedChip, ...]:
    """Return the TPU chips of this host, which may be an emulated one.

    Args:
        environ: with the TPU to emulate, if there is one.
        pci_root: sysfs's directory of PCI devices, for tests.

    Raises:
        UsageError: there is no such TPU to emulate.
    """
    emulated = EmulatedTpu.read(environ)
    return emulated.chips if emulated else attached_chips(pci_root)


def this_slice(environ: Mapping[str, str]) -> TpuSlice:
    """Return the slice that this host belongs to.

    Args:
        environ: without the variables that a launch gives to processes: they describe a part of the host.

    Raises:
        UsageError: neither the environment nor the metadata server describes it.
    """
    # An emulated host describes itself by the variables that GKE sets, so the code below is the same.
    if emulated := EmulatedTpu.read(environ):
        environ = emulated.describe(environ)
    tpu_slice = read_slice(environ, _metadata(environ.get(env.GCE_METADATA_HOST)))
    if tpu_slice is None:
        raise UsageError(
            "TPU chips are attached, but neither the environment nor the metadata server says which slice "
            "they belong to",
            fix=f"Set {env.TPU_SKIP_MDS_QUERY}=1 and {env.TPU_ACCELERATOR_TYPE}=v4-8 (your type).",
        )
    return tpu_slice


def cores(
    tpu_slice: TpuSlice, chips: tuple[AttachedChip, ...], emulated: EmulatedTpu | None
) -> tuple[Device, ...]:
    """Return the cores that one launch can use: this host's, or those of all hosts that it emulates."""
    # Emulated hosts are alike, so the chips that are visible on one are those of each.
    visible = range(len(chips)) if tpu_slice.visible_chips is None else tpu_slice.visible_chips
    hosts = emulated.hosts_here if emulated else 1
    kind = f"emulated {tpu_slice.topology}" if emulated else tpu_slice.topology
    places = [
        (host, chip, core)
        for host in range(tpu_slice.host_index, tpu_slice.host_index + hosts)
        for chip in visible
        for core in range(tpu_slice.accelerator.threads_per_process)
    ]
    return tuple(
        Device(index, "TPU", f"{kind} chip {chip} core {core}", host)
        for index, (host, chip, core) in enumerate(places)
    )


def host_core(tpu_slice: TpuSlice, device: int) -> int:
    """Return a device's core number on its host: devices count only the visible chips."""
    if tpu_slice.visible_chips is None:
        return device
    chip, core = divmod(device, tpu_slice.accelerator.threads_per_process)
    return tpu_slice.visible_chips[chip] * tpu_slice.accelerator.threads_per_process + core


def skip_metadata(tpu_slice: TpuSlice) -> dict[str, str]:
    """Return the variable that stops torch_xla from asking a metadata server that had no answer before."""
    return {env.TPU_SKIP_MDS_QUERY: "1"} if tpu_slice.origin == "environment" else {}


# A process has one client for each server: after a timeout it does not ask again, which would cost each
# launch the same seconds.
@functools.cache
def _metadata(host: str | None) -> MetadataClient:
    return MetadataClient.from_environ({env.GCE_METADATA_HOST: host} if host else {})
