"""One ``polyxla pod run`` as data: the command, its environment on each host, and every limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polyxla.plugin import POLYXLA_RUNTIME, AcceleratorType
from polyxla.plugin import tpu_env as env
from polyxla_pod import tpu_nodes

CONNECT_S = 15.0
"""Default of the longest wait for a host's first answer, in seconds."""
LOST_AFTER_S = 15.0
"""Default of the silence after which a connection counts as lost, on both of its ends, in seconds."""
GRACE_S = 5.0
"""Default of the time between SIGTERM and SIGKILL, in seconds."""
HOST_NUMBER = "{host}"
"""Text in the value of a variable that stands for the host's number."""


@dataclass(frozen=True)
class PodJob:
    """What to run on every host.

    Attributes:
        command: the program and its arguments.
        hosts: the hosts' names, in the order of their numbers.
        addresses: the names or addresses under which the hosts reach each other, in the same order.
        environ: variables that the user sets for the command; `HOST_NUMBER` in a value is the host's number.
        runtime: the runtime to use; None leaves the choice to each host.
        directory: the working directory on the hosts; None for the directory where a connection starts.
        sync: a local directory to copy to `directory` before the start.
        python: the Python on the hosts that has polyxla-pod installed.
        retry: how many times to start again after a failure.
        connect_s: longest wait for a host's first answer, in seconds.
        lost_after_s: silence after which a connection counts as lost, in seconds.
        grace_s: time between SIGTERM and SIGKILL, in seconds.
        preflight: whether to compare the hosts before anything starts.
        starts_workers: whether to start a worker of runtime xrt on each host before the command.
        worker_port: the port of each host's worker, if the command uses workers.

    Raises:
        UsageError: the variables and options of TPU nodes contradict each other.
    """

    command: tuple[str, ...]
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    runtime: str | None = None
    directory: str | None = None
    sync: str | None = None
    python: str = "python3"
    retry: int = 0
    connect_s: float = CONNECT_S
    lost_after_s: float = LOST_AFTER_S
    grace_s: float = GRACE_S
    preflight: bool = True
    starts_workers: bool = False
    worker_port: int = tpu_nodes.WORKER_PORT

    def __post_init__(self) -> None:
        if self.starts_workers:
            tpu_nodes.check_workers(self._runtime, self.environ)
        if self.uses_workers:
            tpu_nodes.check_variables(self.environ, len(self.hosts))

    @property
    def uses_workers(self) -> bool:
        """Whether the command drives TPU nodes: each host a worker."""
        return self._runtime == tpu_nodes.RUNTIME

    @property
    def _runtime(self) -> str | None:
        return self.environ.get(POLYXLA_RUNTIME) or self.runtime

    @property
    def program(self) -> list[str]:
        """The program that a transport starts on each host."""
        return [self.python, "-m", "polyxla_pod.host"]

    def label(self, host: int) -> str:
        """Return a host's number and name, for messages."""
        return f"w{host} ({self.hosts[host]})"

    def environ_of(self, host: int) -> dict[str, str]:
        """Return the variables of the command on one host. What the user sets wins."""
        runtime = {POLYXLA_RUNTIME: self.runtime} if self.runtime else {}
        own = {name: value.replace(HOST_NUMBER, str(host)) for name, value in self.environ.items()}
        if self.uses_workers:
            others = tpu_nodes.variables(self.environ, self.addresses, self.worker_port, host)
        else:
            others = _emulated(self.environ, self.addresses, host)
        return {**runtime, **others, **own}

    def worker_address(self, host: int) -> str:
        """Return the address of a host's worker, ``host:port``."""
        return tpu_nodes.join(self.addresses[host], self.worker_port)

    def worker_command(self, host: int) -> list[str]:
        """Return the command of the worker that is started on a host."""
        return tpu_nodes.worker_command(self.python, self.environ, self.worker_address(host))


def _emulated(environ: Mapping[str, str], addresses: Sequence[str], host: int) -> dict[str, str]:
    """Return the variables that make a host emulate its part of one or several slices."""
    text = environ.get(env.POLYXLA_EMULATE)
    # A single host emulates all of them by itself.
    if not text or len(addresses) == 1:
        return {}
    slices, accelerator = AcceleratorType.parse_slices(text, f"{env.POLYXLA_EMULATE}={text}")
    own = {env.POLYXLA_EMULATE_HOST: str(host)}
    if slices == 1:
        return {**own, env.TPU_WORKER_HOSTNAMES: ",".join(addresses)}
    first = host - host % accelerator.hosts
    return {
        **own,
        env.TPU_WORKER_HOSTNAMES: ",".join(addresses[first : first + accelerator.hosts]),
        env.MEGASCALE_COORDINATOR_ADDRESS: addresses[0],
    }
