"""The device table `XRT_DEVICE_MAP`: the long form of `XRT_TPU_CONFIG`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from polyxla_xrt import env
from polyxla_xrt.config.variables import Variable
from polyxla_xrt.config.workers import Worker, WorkerId, read_entries

DeviceKind = Literal["TPU", "GPU", "CPU"]
"""The kinds of device. Replicas run on the first of these kinds that a map contains."""

_TYPES: dict[str, DeviceKind] = {"TPU": "TPU", "XLA_GPU": "GPU", "XLA_CPU": "CPU"}
_ENTRY = re.compile(
    r"(TPU|GPU|CPU):([0-9]{1,6});"
    r"/job:([A-Za-z0-9_-]+)/replica:0/task:([0-9]{1,6})/device:(TPU|XLA_GPU|XLA_CPU):([0-9]{1,6})"
)


class MappedDevices(NamedTuple):
    """The content of a valid map.

    Attributes:
        kind: the kind of device that replicas run on.
        devices_per_worker: number of devices of that kind of each worker.
    """

    kind: DeviceKind
    devices_per_worker: int


@dataclass(frozen=True, order=True)
class _MappedDevice:
    kind: DeviceKind
    ordinal: int
    worker: WorkerId
    index: int


def read_map(variable: Variable, workers: Sequence[Worker]) -> MappedDevices:
    """Read a device map.

    Args:
        variable: the map.
        workers: the workers whose addresses are known.

    Raises:
        UsageError: the format is wrong, a worker has no address, or the devices are not numbered worker by
            worker with equally many each.
    """
    devices = [_device(variable, entry) for entry in read_entries(variable)]
    known = [worker.id for worker in workers]
    for device in devices:
        if device.worker not in known:
            raise variable.error(
                f"it names the worker {device.worker}, but {env.XRT_WORKERS} lists only "
                f"{', '.join(map(str, known))}",
                f"Add {device.worker};HOST:8470 to {env.XRT_WORKERS}, or correct the name.",
            )
    kind: DeviceKind = next(
        kind for kind in get_args(DeviceKind) if any(device.kind == kind for device in devices)
    )
    _check_numbers(variable, kind, devices, known)
    return MappedDevices(kind, sum(device.kind == kind for device in devices) // len(known))


def _device(variable: Variable, entry: str) -> _MappedDevice:
    match = _ENTRY.fullmatch(entry)
    # An entry names the kind twice, in its own name and in the path of the device, and the two must agree.
    if match is None or _TYPES[match[5]] != match[1]:
        raise variable.error(
            f"{entry!r} is not KIND:n;/job:NAME/replica:0/task:TASK/device:TYPE:i, "
            "with TYPE TPU, XLA_GPU or XLA_CPU for KIND TPU, GPU or CPU",
            "Write each device like TPU:0;/job:tpu_worker/replica:0/task:0/device:TPU:0.",
        )
    worker = WorkerId(match[3], int(match[4]))
    return _MappedDevice(_TYPES[match[5]], int(match[2]), worker, int(match[6]))


def _check_numbers(
    variable: Variable, kind: DeviceKind, devices: Sequence[_MappedDevice], known: Sequence[WorkerId]
) -> None:
    # Devices of other kinds may be in the map, but replicas do not run on them.
    found = sorted(device for device in devices if device.kind == kind)
    each = len(found) // len(known)
    wanted = [
        _MappedDevice(kind, position * each + index, worker, index)
        for position, worker in enumerate(known)
        for index in range(each)
    ]
    if found != wanted:
        raise variable.error(
            f"its {kind} devices must be numbered from {kind}:0, worker by worker in list order, "
            "with equally many on each worker",
            f"Renumber them, or set {env.XRT_TPU_CONFIG} instead of it and {env.XRT_WORKERS}.",
        )
