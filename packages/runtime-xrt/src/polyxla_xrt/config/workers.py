"""Workers, and the two formats of a list of workers.

Pure functions over text: every process parses these variables with the same code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polyxla_xrt import env
from polyxla_xrt.config.addresses import DEFAULT_PORT, join_address, read_address
from polyxla_xrt.config.variables import Variable, parse_integer

_NAME = re.compile(r"[A-Za-z0-9_-]+")


class WorkerId(NamedTuple):
    """A worker's name, and its number among the workers of that name."""

    name: str
    task: int

    def __str__(self) -> str:
        return f"{self.name}:{self.task}"


@dataclass(frozen=True)
class Worker:
    """A service that owns cores.

    Attributes:
        name: such as ``tpu_worker``.
        task: its number, ``0 <= task``.
        host: a host name or an address; IPv6 without brackets.
        port: 1 to 65535, or 0 if the plan chooses one for the worker that this host starts.
    """

    name: str
    task: int
    host: str
    port: int

    @property
    def id(self) -> WorkerId:
        """Name and task, as in `XRT_LOCAL_WORKER`."""
        return WorkerId(self.name, self.task)

    @property
    def address(self) -> str:
        """The address, ``host:port``; an IPv6 host is in brackets."""
        return join_address(self.host, self.port)

    def __str__(self) -> str:
        return f"{self.name};{self.task};{self.address}"


def read_workers(variable: Variable) -> tuple[Worker, ...]:
    """Read a list of workers: `XRT_TPU_CONFIG`, or `XRT_WORKERS`, whose items have ``name:task``.

    Raises:
        UsageError: the format is wrong, a worker is listed twice, or the tasks do not count from 0 in order.
    """
    # The formats differ only in what joins the name and the task, which is a colon in XRT_WORKERS.
    colon = variable.name == env.XRT_WORKERS
    workers = tuple(_worker(variable, entry, colon=colon) for entry in read_entries(variable))
    _check_together(variable, workers)
    return workers


def write_workers(workers: Sequence[Worker]) -> str:
    """Format workers for `XRT_TPU_CONFIG`."""
    return "|".join(str(worker) for worker in workers)


def read_entries(variable: Variable) -> list[str]:
    """Split a list at its ``|``.

    Raises:
        UsageError: the value contains quotes or commas, or an item is empty.
    """
    name, text = variable
    # Quotes reach a program if no shell reads the value, such as from a file of variables.
    if quotes := {"'", '"'}.intersection(text):
        raise variable.error(
            "the value contains quotes: no shell removed them",
            f"Write {name}={''.join(char for char in text if char not in quotes)} there, without quotes.",
        )
    # A comma cannot be part of a host, so it must be meant as a separator.
    if "," in text:
        raise variable.error(
            "items are separated by '|', not by a comma", f'Write {name}="{text.replace(",", "|")}".'
        )
    entries = [entry.strip() for entry in text.split("|")]
    if not all(entries):
        rest = "|".join(entry for entry in entries if entry)
        raise variable.error(
            "there is an empty item beside a '|'", f'Write {name}="{rest or _example(name)}".'
        )
    return entries


def read_worker_id(variable: Variable) -> WorkerId:
    """Read ``name:task``; the task defaults to 0.

    Raises:
        UsageError: the format is wrong.
    """
    name, colon, task = variable.text.partition(":")
    number = parse_integer(task) if colon else 0
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
        raise variable.error(f"{name!r} in {entry!r} is not a valid worker name", advice)
    number = parse_integer(task)
    if number is None:
        raise variable.error(f"the task {task!r} in {entry!r} is not a non-negative integer", advice)
    return Worker(name, number, *read_address(variable, address))


def _check_together(variable: Variable, workers: Sequence[Worker]) -> None:
    counted = Counter(worker.id for worker in workers)
    if twice := [str(worker) for worker, times in counted.items() if times > 1]:
        raise variable.error(
            f"{', '.join(twice)} is listed more than once", "List each worker once, with its own task."
        )
    if len(names := sorted({worker.name for worker in workers})) > 1:
        raise variable.error(
            f"the workers of a job must share one name, but these are named {', '.join(names)}",
            f"Name them all {workers[0].name}.",
        )
    tasks = [worker.task for worker in workers]
    # The task is used as an index of this list and as the index of a host.
    if tasks != list(range(len(workers))):
        wanted = ", ".join(str(number) for number in range(len(workers)))
        raise variable.error(
            f"the tasks are {', '.join(map(str, tasks))}, but cores are numbered in list order",
            f"Sort and number the workers so that their tasks are {wanted}.",
        )


def _example(name: str) -> str:
    joint = ":" if name == env.XRT_WORKERS else ";"
    return f"tpu_worker{joint}0;10.0.0.2:{DEFAULT_PORT}"
