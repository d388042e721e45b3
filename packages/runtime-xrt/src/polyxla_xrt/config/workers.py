"""Workers, and the two ways their lists are spelt.

Pure functions over text, used for every variable and by every process, so that no two layers read the
same value differently.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polyxla_xrt import env
from polyxla_xrt.config.addresses import USUAL_PORT, join_address, read_address
from polyxla_xrt.config.variables import Variable, whole

_NAME = re.compile(r"[A-Za-z0-9_-]+")


class WorkerId(NamedTuple):
    """A worker's name, and its number among those of the same name."""

    name: str
    task: int

    def __str__(self) -> str:
        return f"{self.name}:{self.task}"


@dataclass(frozen=True)
class Worker:
    """A service that owns cores.

    Attributes:
        name: what it is called, such as ``tpu_worker``.
        task: its number, ``0 <= task``.
        host: a host name or an address; IPv6 without brackets.
        port: 1 to 65535, or 0 where the service is yet to choose one.
    """

    name: str
    task: int
    host: str
    port: int

    @property
    def id(self) -> WorkerId:
        """What `XRT_LOCAL_WORKER` calls it."""
        return WorkerId(self.name, self.task)

    @property
    def address(self) -> str:
        """Where to reach it, ``host:port``; an IPv6 host is in brackets."""
        return join_address(self.host, self.port)

    def __str__(self) -> str:
        return f"{self.name};{self.task};{self.address}"


def read_workers(variable: Variable) -> tuple[Worker, ...]:
    """Read a list of workers: `XRT_TPU_CONFIG`, or `XRT_WORKERS`, whose items have ``name:task``.

    Raises:
        UsageError: it is not spelt so, names a worker twice, or does not number them from 0 in order.
    """
    # In XRT_WORKERS the name and the task are joined by a colon, and the rest is the same.
    colon = variable.name == env.XRT_WORKERS
    workers = tuple(_worker(variable, entry, colon=colon) for entry in read_entries(variable))
    _check_together(variable, workers)
    return workers


def write_workers(workers: Sequence[Worker]) -> str:
    """Write workers as `XRT_TPU_CONFIG` has them."""
    return "|".join(str(worker) for worker in workers)


def read_entries(variable: Variable) -> list[str]:
    """Split a list at its ``|``.

    Raises:
        UsageError: quotes are part of it, its items are joined by something else, or one is empty.
    """
    name, text = variable
    if quotes := {"'", '"'}.intersection(text):
        raise variable.error(
            "the quotes are part of the value, as they are where no shell reads it",
            f"Write {name}={''.join(char for char in text if char not in quotes)} there, without quotes.",
        )
    if "," in text:
        raise variable.error(
            "a comma does not separate anything here", f'Write {name}="{text.replace(",", "|")}".'
        )
    entries = [entry.strip() for entry in text.split("|")]
    if not all(entries):
        rest = "|".join(entry for entry in entries if entry)
        raise variable.error(
            "there is nothing at one side of a '|'", f'Write {name}="{rest or _example(name)}".'
        )
    return entries


def read_worker_id(variable: Variable) -> WorkerId:
    """Read ``name:task``; the task is 0 where it is left out.

    Raises:
        UsageError: it is not spelt so.
    """
    name, colon, task = variable.text.partition(":")
    number = whole(task) if colon else 0
    if number is None or not _NAME.fullmatch(name):
        raise variable.error(
            f"{variable.text!r} is not name:task", f"Write it like {variable.name}=tpu_worker:0."
        )
    return WorkerId(name, number)


def _worker(variable: Variable, entry: str, *, colon: bool) -> Worker:
    first, semicolon, rest = entry.partition(";")
    split = f"{first.replace(':', ';', 1)}{semicolon}{rest}" if colon else entry
    fields = [field.strip() for field in split.split(";")]
    shape = "name:task;host:port" if colon else "name;task;host:port"
    advice = f"Write {shape}, such as {_example(variable.name)}, several joined by '|'."
    if len(fields) != 3 or (colon and ":" not in first):
        raise variable.error(f"{entry!r} is not {shape}", advice)
    name, task, address = fields
    if not _NAME.fullmatch(name):
        raise variable.error(f"{name!r} in {entry!r} is not a worker's name", advice)
    number = whole(task)
    if number is None:
        raise variable.error(f"the task {task!r} in {entry!r} is not a whole number from 0", advice)
    return Worker(name, number, *read_address(variable, address))


def _check_together(variable: Variable, workers: Sequence[Worker]) -> None:
    counted = Counter(worker.id for worker in workers)
    if twice := [str(worker) for worker, times in counted.items() if times > 1]:
        raise variable.error(
            f"{', '.join(twice)} is there more than once", "Name each worker once, with its own task."
        )
    if len(names := sorted({worker.name for worker in workers})) > 1:
        raise variable.error(
            f"the workers of one job have one name, and these are called {', '.join(names)}",
            f"Call them all {workers[0].name}.",
        )
    tasks = [worker.task for worker in workers]
    if tasks != list(range(len(workers))):
        wanted = ", ".join(str(number) for number in range(len(workers)))
        raise variable.error(
            f"the tasks are {', '.join(map(str, tasks))}, but cores are numbered in the order of the list",
            f"Sort and number the workers so that their tasks are {wanted}.",
        )


def _example(name: str) -> str:
    joint = ":" if name == env.XRT_WORKERS else ";"
    return f"tpu_worker{joint}0;10.0.0.2:{USUAL_PORT}"
