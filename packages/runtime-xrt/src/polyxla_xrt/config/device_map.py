"""The table of devices, `XRT_DEVICE_MAP`: the long way to write what `XRT_TPU_CONFIG` says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from polyxla_xrt import env
from polyxla_xrt.config.variables import Variable
from polyxla_xrt.config.workers import Worker, WorkerId, read_entries

Kind = Literal["TPU", "GPU", "CPU"]
"""What devices are called. The first of these that a map has is what its replicas are on."""

_TYPES: dict[str, Kind] = {"TPU": "TPU", "XLA_GPU": "GPU", "XLA_CPU": "CPU"}
_ENTRY = re.compile(
    r"(TPU|GPU|CPU):([0-9]{1,6});"
    r"/job:([A-Za-z0-9_-]+)/replica:0/task:([0-9]{1,6})/device:(TPU|XLA_GPU|XLA_CPU):([0-9]{1,6})"
)


class Mapped(NamedTuple):
    """What a map says, once it is known to be a regular one."""

    kind: Kind
    devices_per_worker: int


@dataclass(frozen=True, order=True)
class _Device:
    kind: Kind
    ordinal: int
    worker: WorkerId
    index: int


def read_map(variable: Variable, workers: Sequence[Worker]) -> Mapped:
    """Read a map whose workers' addresses are known.

    Raises:
        UsageError: it is not spelt like one, names a worker that has no address, or numbers the devices
            of its kind otherwise than through the workers in their order, as many of each.
    """
    devices = [_device(variable, entry) for entry in read_entries(variable)]
    known = [worker.id for worker in workers]
    for device in devices:
        if device.worker not in known:
            raise variable.error(
                f"it names the worker {device.worker}, and {env.XRT_WORKERS} has only "
                f"{', '.join(map(str, known))}",
                f"Add {device.worker};HOST:8470 to {env.XRT_WORKERS}, or correct the name.",
            )
    kind: Kind = next(kind for kind in get_args(Kind) if any(device.kind == kind for device in devices))
    _check_numbers(variable, kind, devices, known)
    return Mapped(kind, sum(device.kind == kind for device in devices) // len(known))


def _device(variable: Variable, entry: str) -> _Device:
    match = _ENTRY.fullmatch(entry)
    if match is None or _TYPES[match[5]] != match[1]:
        raise variable.error(
            f"{entry!r} is not KIND:n;/job:NAME/replica:0/task:TASK/device:TYPE:i, "
            "with TYPE TPU, XLA_GPU or XLA_CPU for KIND TPU, GPU or CPU",
            "Write each device like TPU:0;/job:tpu_worker/replica:0/task:0/device:TPU:0.",
        )
    worker = WorkerId(match[3], int(match[4]))
    return _Device(_TYPES[match[5]], int(match[2]), worker, int(match[6]))


def _check_numbers(
    variable: Variable, kind: Kind, devices: Sequence[_Device], known: Sequence[WorkerId]
) -> None:
    found = sorted(device for device in devices if device.kind == kind)
    each = len(found) // len(known)
    wanted = [
        _Device(kind, position * each + index, worker, index)
        for position, worker in enumerate(known)
        for index in range(each)
    ]
    if found != wanted:
        raise variable.error(
            f"its {kind} devices do not count from {kind}:0 through the workers in their order, "
            "as many of each worker",
            f"Number them so, or write {env.XRT_TPU_CONFIG} in place of it and of {env.XRT_WORKERS}.",
        )
