"""A device map is numbered regularly, or refused."""

from __future__ import annotations

import pytest

from polyxla import UsageError
from polyxla_xrt import env
from polyxla_xrt.config.device_map import MappedDevices, read_map
from polyxla_xrt.config.variables import Variable
from polyxla_xrt.config.workers import Worker

ONE = (Worker("w", 0, "a", 1),)
TWO = (*ONE, Worker("w", 1, "b", 1))


def entry(
    number: int, task: int, index: int, kind: str = "TPU", type_: str | None = None, job: str = "w"
) -> str:
    return f"{kind}:{number};/job:{job}/replica:0/task:{task}/device:{type_ or kind}:{index}"


@pytest.mark.parametrize(
    ("entries", "workers", "expected"),
    [
        ([entry(0, 0, 0)], ONE, MappedDevices("TPU", 1)),
        ([entry(1, 0, 1), entry(0, 0, 0)], ONE, MappedDevices("TPU", 2)),
        ([entry(0, 0, 0), entry(1, 1, 0)], TWO, MappedDevices("TPU", 1)),
        ([entry(0, 0, 0, "CPU", "XLA_CPU")], ONE, MappedDevices("CPU", 1)),
        ([entry(0, 0, 0, "CPU", "XLA_CPU"), entry(0, 0, 0)], ONE, MappedDevices("TPU", 1)),
        (
            [
                entry(0, 0, 0, "CPU", "XLA_CPU"),
                entry(0, 0, 0, "GPU", "XLA_GPU"),
                entry(1, 0, 1, "GPU", "XLA_GPU"),
            ],
            ONE,
            MappedDevices("GPU", 2),
        ),
    ],
)
def test_valid_maps(entries: list[str], workers: tuple[Worker, ...], expected: MappedDevices) -> None:
    assert read_map(Variable(env.XRT_DEVICE_MAP, "|".join(entries)), workers) == expected


@pytest.mark.parametrize(
    ("text", "workers", "what"),
    [
        ("TPU:0", ONE, "'TPU:0' is not KIND:n;"),
        (f"{entry(0, 0, 0)} ;", ONE, "is not KIND:n;"),
        (entry(0, 0, 0, "XPU"), ONE, "is not KIND:n;"),
        (entry(0, 0, 0, "CPU", "CPU"), ONE, "is not KIND:n;"),
        (entry(0, 0, 0, "CPU", "XLA_GPU"), ONE, "is not KIND:n;"),
        (entry(0, 0, 0) + "," + entry(1, 0, 1), ONE, "items are separated by '|', not by a comma"),
        (entry(0, 1, 0), ONE, "it names the worker w:1, but XRT_WORKERS lists only w:0"),
        (entry(0, 0, 0, job="v"), TWO, "it names the worker v:0, but XRT_WORKERS lists only w:0, w:1"),
        (entry(1, 0, 0), ONE, "its TPU devices must be numbered from TPU:0"),
        (entry(0, 0, 1), ONE, "its TPU devices must be numbered from TPU:0"),
        (entry(0, 0, 0) + "|" + entry(0, 0, 0), ONE, "its TPU devices must be numbered from TPU:0"),
        (entry(0, 1, 0) + "|" + entry(1, 0, 0), TWO, "worker by worker in list order"),
        (entry(0, 0, 0), TWO, "with equally many on each worker"),
        ("|".join([entry(0, 0, 0), entry(1, 0, 1), entry(2, 1, 0)]), TWO, "with equally many on each worker"),
    ],
)
def test_invalid_maps(text: str, workers: tuple[Worker, ...], what: str) -> None:
    with pytest.raises(UsageError) as wrong:
        read_map(Variable(env.XRT_DEVICE_MAP, text), workers)
    assert what in wrong.value.what
    assert wrong.value.where == f"XRT_DEVICE_MAP={text}"
