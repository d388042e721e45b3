"""The variables of each process of a TPU slice, computed from the slice alone.

Pure functions: no environment, no files, no clock. libtpu reads the variables. torch_xla sets the same ones
where they are unset, so each process needs all of them.

Source: ``configure_topology`` and ``configure_one_chip_topology`` of torch_xla 2.9.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from polyxla.errors import DevicesError, UsageError
from polyxla.tpu import env
from polyxla.tpu.accelerators import GENERATIONS, AcceleratorType, Bounds, Shape

BASE_PORT = 8476
"""The port of a host's first process; the others follow. Source: torch_xla 2.9.0."""

_ONE: Shape = (1, 1, 1)


def process_environments(
    accelerator: AcceleratorType,
    *,
    worker_id: int = 0,
    hostnames: Sequence[str] = ("localhost",),
    bounds: Bounds | None = None,
    local_processes: int | None = None,
    chips: Sequence[int] | None = None,
    base_port: int = BASE_PORT,
) -> tuple[dict[str, str], ...]:
    """Compute the variables of every process of one host, one process per chip.

    Args:
        accelerator: the slice's type.
        worker_id: this host's number among `hostnames`.
        hostnames: all hosts of the slice, in the order of their worker ids.
        bounds: the slice's arrangement; None for the default one of its type.
        local_processes: the number of processes of this host, to be checked.
        chips: the chip that each process opens; None for 0, 1, 2, ...
        base_port: the port of the first process, the same on every host. The others follow; on a single host
            each chip has its own port, so that jobs on other chips of the host do not need the same ones.

    Returns:
        One mapping per local process, in the order of their task ids.

    Raises:
        UsageError: the arguments contradict each other.
    """
    bounds = bounds or accelerator.bounds
    here = bounds.chips_per_host_count
    check_workers(bounds, worker_id, hostnames)
    _check_processes(accelerator, here, local_processes)
    chips = _check_chips(here, chips)
    # Jobs on different chips of one host must not share ports; hosts of a slice must agree on them.
    ports = [base_port + step for step in (chips if bounds.host_count == 1 else range(here))]
    _check_ports(base_port, max(ports))
    processes = [*bounds.chips]
    if GENERATIONS[accelerator.generation].bounds_count_devices:
        # libtpu expects a fourth number from this generation on.
        processes.append(accelerator.threads_per_process)
    shared = _shared(processes, _ONE, process_addresses(hostnames, ports))
    first = worker_id * here
    return tuple(
        shared | _own(task_id=first + rank, port=port, chip=chip)
        for rank, (port, chip) in enumerate(zip(ports, chips, strict=True))
    )


def host_environment(bounds: Bounds, worker_id: int, hostnames: Sequence[str]) -> dict[str, str]:
    """Compute the variables of a process that opens all chips of its host, as in an SPMD program."""
    own = {env.CLOUD_TPU_TASK_ID: str(worker_id), env.TPU_PROCESS_PORT: str(BASE_PORT)}
    return own | _shared(bounds.hosts, bounds.chips_per_host, process_addresses(hostnames, [BASE_PORT]))


def single_core_environment(
    core_index: int,
    accelerator: AcceleratorType,
    *,
    bounds: Bounds | None = None,
    base_port: int = BASE_PORT,
) -> tuple[dict[str, str], int]:
    """Compute the variables of a process that uses one of this host's cores.

    The process sees the whole chip, which on v2 and v3 is two devices; it uses one of them.

    Args:
        core_index: the device's number on this host, from 0.
        accelerator: the slice's type.
        bounds: as in `process_environments`.
        base_port: the port of the first chip; each chip has its own, so that two such jobs can share a host.

    Returns:
        The variables, and the device's index within the process.

    Raises:
        DevicesError: this host does not have this core.
    """
    threads = accelerator.threads_per_process
    here = (bounds or accelerator.bounds).chips_per_host_count * threads
    if not 0 <= core_index < here:
        raise DevicesError(
            f"a host of {accelerator.name} has the devices 0 to {here - 1}",
            where=f"devices=[{core_index}]",
            fix="Choose one of those.",
        )
    chip, local_index = divmod(core_index, threads)
    # The process is a slice of its own, with one host, one process and one chip.
    alone = _shared(_ONE, _ONE, [f"localhost:{base_port + chip}"])
    return alone | _own(task_id=0, port=base_port + chip, chip=chip), local_index


def process_addresses(hostnames: Sequence[str], ports: Sequence[int]) -> list[str]:
    """List ``host:port`` of every process of the slice in the order of their task ids.

    Each host has a process at each of the ports. The only host of a slice is always ``localhost``: its name
    need not resolve.
    """
    names = [_in_address(name) for name in hostnames] if len(hostnames) > 1 else ["localhost"]
    return [f"{name}:{port}" for name in names for port in ports]


def check_workers(
    bounds: Bounds, worker_id: int, hostnames: Sequence[str], *, where: str = env.TPU_WORKER_HOSTNAMES
) -> None:
    """Check the hosts' names and this host's number against the bounds.

    Raises:
        UsageError: too many or too few names, a name twice, or a worker id out of range.
    """
    count = bounds.host_count
    if len(hostnames) != count:
        raise UsageError(
            f"the slice has {count} {_plural(count, 'host')} ({join(bounds.hosts)}), "
            f"but {len(hostnames)} {_plural(len(hostnames), 'name')} of hosts",
            where=where,
            fix=f"Give {count} {_plural(count, 'name')}, comma separated, in the order of the worker ids.",
        )
    if len(set(hostnames)) != count:
        twice, _ = Counter(hostnames).most_common(1)[0]
        raise UsageError(
            f"more than one worker has the name {twice}",
            where=where,
            fix="Name each host once, in the order of the worker ids.",
        )
    if not 0 <= worker_id < count:
        raise no_such_worker(str(worker_id), count, f"worker_id={worker_id}")


def no_such_worker(text: str, host_count: int, where: str) -> UsageError:
    """Make the error for a worker id that is missing, not a number, or out of range."""
    allowed = f"an integer from 0 to {host_count - 1}, a different one on each host"
    return UsageError(
        f"the worker id {text!r} does not fit a slice of {host_count} {_plural(host_count, 'host')}",
        where=where,
        fix=f"Write {allowed if host_count > 1 else '0'}.",
    )


def join(numbers: Sequence[int]) -> str:
    """Join numbers as the variables need them: ``2,2,1``."""
    return ",".join(map(str, numbers))


def _shared(processes: Sequence[int], chips: Sequence[int], addresses: Sequence[str]) -> dict[str, str]:
    return {
        env.TPU_PROCESS_BOUNDS: join(processes),
        env.TPU_CHIPS_PER_PROCESS_BOUNDS: join(chips),
        env.TPU_PROCESS_ADDRESSES: ",".join(addresses),
    }


def _own(*, task_id: int, port: int, chip: int) -> dict[str, str]:
    return {
        env.CLOUD_TPU_TASK_ID: str(task_id),
        env.TPU_PROCESS_PORT: str(port),
        env.TPU_VISIBLE_CHIPS: str(chip),
    }


def _check_processes(accelerator: AcceleratorType, here: int, asked: int | None) -> None:
    if asked is not None and asked != here:
        raise UsageError(
            f"a host of this {accelerator.name} has {here} {_plural(here, 'chip')}, so it needs as many "
            f"processes, not {asked}",
            where=f"local_processes={asked}",
            fix=f"Use all of them, or one with devices=[i], or set {env.TPU_PROCESS_BOUNDS} and "
            f"{env.TPU_CHIPS_PER_PROCESS_BOUNDS} to the part to use.",
        )


def _check_chips(here: int, chips: Sequence[int] | None) -> Sequence[int]:
    if chips is None:
        return range(here)
    if len(set(chips)) != here or len(chips) != here or min(chips) < 0:
        raise UsageError(
            f"each of {here} {_plural(here, 'process')} needs a chip of its own",
            where=f"chips={join(chips)}",
            fix=f"List {here} different chips.",
        )
    return chips


def _check_ports(base_port: int, last: int) -> None:
    if base_port < 1 or last > 65535:
        raise UsageError(
            f"the ports from {base_port} to {last} do not exist",
            where=f"base_port={base_port}",
            fix=f"Choose a number from 1 to {65535 - last + base_port}.",
        )


def _in_address(name: str) -> str:
    """Put an IPv6 address in brackets; otherwise its last group would be read as the port."""
    return f"[{name}]" if ":" in name and not name.startswith("[") else name


def _plural(count: int, word: str) -> str:
    if count == 1:
        return word
    return f"{word}es" if word.endswith("s") else f"{word}s"
