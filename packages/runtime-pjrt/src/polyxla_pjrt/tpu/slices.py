"""Which slice this host belongs to: told by variables, or by the metadata server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from polyxla.errors import UsageError
from polyxla_pjrt import env
from polyxla_pjrt.tpu.accelerators import AcceleratorType, Bounds, parse_shape
from polyxla_pjrt.tpu.metadata import MetadataClient, MetadataKeyError, MetadataUnreachableError
from polyxla_pjrt.tpu.topology import check_workers, join, no_such_worker

Origin = Literal["environment", "metadata server"]

_DESCRIPTION = (
    env.TPU_ACCELERATOR_TYPE,
    env.TPU_PROCESS_BOUNDS,
    env.TPU_HOST_BOUNDS,
    env.TPU_CHIPS_PER_PROCESS_BOUNDS,
    env.TPU_CHIPS_PER_HOST_BOUNDS,
    env.CLOUD_TPU_TASK_ID,
    env.TPU_WORKER_ID,
    env.TPU_WORKER_HOSTNAMES,
)


@dataclass(frozen=True)
class Slice:
    """A TPU slice as one of its hosts sees it.

    Attributes:
        accelerator: its type, with this slice's own arrangement as its bounds.
        worker_id: this host's number, ``0 <= worker_id < bounds.host_count``.
        hostnames: all hosts in the order of their worker ids.
        bounds: how its hosts and chips are arranged.
        origin: who told.
        visible_chips: the chips of this host to use, where a variable picks them; else None.
        ignored: variables that are set and describe a slice, but were not asked.
    """

    accelerator: AcceleratorType
    worker_id: int
    hostnames: tuple[str, ...]
    bounds: Bounds
    origin: Origin
    visible_chips: tuple[int, ...] | None = None
    ignored: tuple[str, ...] = ()


def read_slice(environ: Mapping[str, str], metadata: MetadataClient) -> Slice | None:
    """Find out about this host's slice.

    With `TPU_SKIP_MDS_QUERY` the variables are asked, else the metadata server; where that one is not
    reachable, or knows of no TPU, the variables again. May block as long as `metadata` does.

    Returns:
        The slice, or None where neither knows of one.

    Raises:
        UsageError: a value is missing, makes no sense, or contradicts another.
        MetadataError: the metadata server answered, but not usably.
    """
    if _skips_metadata(environ):
        return _from_environ(environ)
    told = _told_by_metadata(metadata)
    if told is not None:
        return _slice(told, "metadata server", environ)
    return _from_environ(environ) if environ.get(env.TPU_ACCELERATOR_TYPE) else None


def read_visible_chips(environ: Mapping[str, str], chip_count: int) -> tuple[int, ...] | None:
    """Read which of a host's chips are to be used; None where no variable says.

    Args:
        environ: the environment to read.
        chip_count: number of chips of this host.

    Raises:
        UsageError: these are not numbers of different chips of this host.
    """
    text = environ.get(env.TPU_VISIBLE_CHIPS)
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    chips = tuple(int(part) for part in parts if part.isdecimal() and len(part) < 6)
    if len(chips) != len(parts) or len(set(chips)) != len(parts) or max(chips) >= chip_count:
        numbers = "0" if chip_count == 1 else f"0 to {chip_count - 1}"
        raise UsageError(
            f"this host's chips have the numbers {numbers}, and {text!r} names others",
            where=f"{env.TPU_VISIBLE_CHIPS}={text}",
            fix="Name each chip to use once, comma separated, or unset it to use all.",
        )
    return chips


class _Said(NamedTuple):
    """A value as text, and who said it."""

    text: str
    where: str


@dataclass(frozen=True)
class _Told:
    """What a source says of the slice; None for what it leaves out."""

    accelerator: _Said | None
    hosts: _Said | None
    chips_per_host: _Said | None
    worker_id: _Said | None
    hostnames: _Said | None


def _skips_metadata(environ: Mapping[str, str]) -> bool:
    text = environ.get(env.TPU_SKIP_MDS_QUERY, "")
    if text.strip().lower() in ("0", "false", "no", "off"):
        raise UsageError(
            f"{env.TPU_SKIP_MDS_QUERY} counts as set whatever its text, so {text!r} does not switch it off",
            where=f"{env.TPU_SKIP_MDS_QUERY}={text}",
            fix=f"Unset it to ask the metadata server, or write {env.TPU_SKIP_MDS_QUERY}=1 not to.",
        )
    return bool(text)


def _from_environ(environ: Mapping[str, str]) -> Slice:
    def said(*names: str) -> _Said | None:
        present = (name for name in names if environ.get(name))
        return next((_Said(environ[name], f"{name}={environ[name]}") for name in present), None)

    told = _Told(
        accelerator=said(env.TPU_ACCELERATOR_TYPE),
        hosts=said(env.TPU_PROCESS_BOUNDS, env.TPU_HOST_BOUNDS),
        chips_per_host=said(env.TPU_CHIPS_PER_PROCESS_BOUNDS, env.TPU_CHIPS_PER_HOST_BOUNDS),
        worker_id=said(env.CLOUD_TPU_TASK_ID, env.TPU_WORKER_ID),
        hostnames=said(env.TPU_WORKER_HOSTNAMES),
    )
    return _slice(told, "environment", environ)


def _told_by_metadata(metadata: MetadataClient) -> _Told | None:
    """Ask the metadata server; None where it is not there or knows of no TPU.

    Source: the keys of ``tpu-env`` as printed on a v4-256, and those torch_xla 2.9.0 reads.
    """
    try:
        tpu_env = metadata.tpu_env()
    except (MetadataUnreachableError, MetadataKeyError):
        return None

    def said(*keys: str) -> _Said | None:
        present = (key for key in keys if tpu_env.get(key))
        return next((_Said(tpu_env[key], f"{key} in the metadata server's tpu-env") for key in present), None)

    return _Told(
        accelerator=said("ACCELERATOR_TYPE") or _attribute(metadata, "accelerator-type"),
        hosts=said("TPU_PROCESS_BOUNDS", "HOST_BOUNDS"),
        chips_per_host=said("TPU_CHIPS_PER_PROCESS_BOUNDS", "CHIPS_PER_HOST_BOUNDS"),
        worker_id=said("WORKER_ID"),
        hostnames=_endpoints(metadata),
    )


def _attribute(metadata: MetadataClient, key: str) -> _Said:
    return _Said(metadata.attribute(key), f"the metadata server's {key}")


def _endpoints(metadata: MetadataClient) -> _Said | None:
    try:
        addresses = metadata.worker_addresses()
    except MetadataKeyError:
        return None
    return _Said(",".join(addresses), "the metadata server's worker-network-endpoints")


def _slice(told: _Told, origin: Origin, environ: Mapping[str, str]) -> Slice:
    if told.accelerator is None:
        raise UsageError(
            "the slice's type is not given",
            where=f"{env.TPU_SKIP_MDS_QUERY}={environ.get(env.TPU_SKIP_MDS_QUERY, '')}",
            fix=f"Set {env.TPU_ACCELERATOR_TYPE}, such as v4-8, or unset {env.TPU_SKIP_MDS_QUERY} "
            "to ask the metadata server.",
        )
    accelerator = AcceleratorType.parse(*told.accelerator)
    bounds = _bounds(accelerator, told, origin)
    hostnames = _hostnames(bounds, told)
    worker_id = _worker_id(bounds, told)
    named = told.hostnames.where if told.hostnames else f"{env.TPU_WORKER_HOSTNAMES} is unset"
    check_workers(bounds, worker_id, hostnames, where=named)
    return Slice(
        accelerator=dataclasses.replace(accelerator, bounds=bounds),
        worker_id=worker_id,
        hostnames=hostnames,
        bounds=bounds,
        origin=origin,
        visible_chips=_visible_chips(environ, accelerator, bounds),
        ignored=tuple(name for name in _DESCRIPTION if environ.get(name)) if origin != "environment" else (),
    )


def _bounds(accelerator: AcceleratorType, told: _Told, origin: Origin) -> Bounds:
    # torch_xla trusts its table alone for v2 and v3, whose metadata had no bounds when it was written.
    if origin == "metadata server" and accelerator.generation in ("v2", "v3"):
        return accelerator.bounds
    hosts, chips = accelerator.bounds.hosts, accelerator.bounds.chips_per_host
    if told.hosts:
        hosts = parse_shape(*told.hosts)
    if told.chips_per_host:
        chips = parse_shape(*told.chips_per_host)
    bounds = Bounds(hosts, chips)
    if bounds.chip_count > accelerator.chips:
        said = [said.where for said in (told.hosts, told.chips_per_host) if said]
        raise UsageError(
            f"hosts {join(hosts)} with chips {join(chips)} each are {bounds.chip_count} chips, "
            f"but {accelerator.name} has {accelerator.chips}",
            where=" and ".join(said),
            fix=f"Unset them, or write {join(accelerator.bounds.hosts)} and "
            f"{join(accelerator.bounds.chips_per_host)}.",
        )
    return bounds


def _hostnames(bounds: Bounds, told: _Told) -> tuple[str, ...]:
    if told.hostnames is None:
        return ("localhost",) if bounds.host_count == 1 else ()
    return tuple(name.strip() for name in told.hostnames.text.split(",") if name.strip())


def _worker_id(bounds: Bounds, told: _Told) -> int:
    if told.worker_id is None and bounds.host_count == 1:
        return 0
    if told.worker_id is None:
        raise no_such_worker("", bounds.host_count, f"{env.TPU_WORKER_ID} is unset")
    text = told.worker_id.text.strip()
    if not text.isdecimal() or len(text) > 6 or int(text) >= bounds.host_count:
        raise no_such_worker(text, bounds.host_count, told.worker_id.where)
    return int(text)


def _visible_chips(
    environ: Mapping[str, str], accelerator: AcceleratorType, bounds: Bounds
) -> tuple[int, ...] | None:
    """Read the chips to use. A host may have more than the bounds speak of: its type says how many."""
    here = bounds.chips_per_host_count
    chips = read_visible_chips(environ, max(here, accelerator.chips_per_host))
    if chips is not None and len(chips) != here:
        raise UsageError(
            f"{len(chips)} of this host's chips are to be used, but the bounds speak of {here}",
            where=f"{env.TPU_VISIBLE_CHIPS}={environ[env.TPU_VISIBLE_CHIPS]}",
            fix=f"Unset it and choose with devices=[i], or set {env.TPU_PROCESS_BOUNDS} and "
            f"{env.TPU_CHIPS_PER_PROCESS_BOUNDS} to the arrangement of those chips, such as 1,1,1 for one.",
        )
    return chips
