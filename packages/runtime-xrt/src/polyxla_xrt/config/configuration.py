"""The XRT configuration: the workers and cores that the environment describes, or what is wrong with it.

Pure: no sockets, no files, no processes. The command line, the launcher and the replicas share this parser.
Source of meanings and precedence: torch_xla 1.13, computation_client.cc and xla_multiprocessing.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyxla import UsageError
from polyxla_xrt import env
from polyxla_xrt.config.addresses import GRPC, join_address, read_address
from polyxla_xrt.config.device_map import DeviceKind, read_map
from polyxla_xrt.config.timeouts import MESH_CONNECT_WAIT_S, mesh_connect_wait_s
from polyxla_xrt.config.variables import Variable, find, read_count, read_flag
from polyxla_xrt.config.workers import Worker, WorkerId, read_worker_id, read_workers

DEFAULT_CORES = 8
"""Number of cores of a worker if `TPU_NUM_DEVICES` is unset. Source: torch_xla 1.13."""
LOCAL_SERVICE = "localservice"
"""The worker name that means a worker on this host, which polyxla may start."""


@dataclass(frozen=True)
class Configuration:
    """A job's workers and hosts, as one of its hosts reads them before it starts processes.

    Attributes:
        source: the variable that describes the workers.
        kind: the kind of device that replicas run on.
        workers: all workers in order; empty if only the mesh service knows them.
        devices_per_worker: number of devices of that kind on each worker.
        local_worker: the worker whose devices this host drives.
        hosts: number of hosts; each drives one worker.
        mesh_address: ``host:port`` of the mesh service; None if the launcher may choose it.
        mesh_connect_wait_s: longest wait for the mesh service to answer, in seconds.
        may_start_service: whether this host may start a worker named ``localservice``.
        warnings: messages for the user, such as a variable that has no effect.
    """

    source: str
    kind: DeviceKind
    workers: tuple[Worker, ...]
    devices_per_worker: int
    local_worker: WorkerId
    hosts: int = 1
    mesh_address: str | None = None
    mesh_connect_wait_s: int = MESH_CONNECT_WAIT_S
    may_start_service: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def host_index(self) -> int:
        """The index of this host, ``0 <= host_index < hosts``: the task of its worker."""
        return self.local_worker.task

    @property
    def starts_service(self) -> bool:
        """Whether this host starts its worker itself if none answers."""
        return self.may_start_service and self.local_worker.name == LOCAL_SERVICE


@dataclass(frozen=True)
class _Cluster:
    """The workers, as the chosen variable describes them."""

    source: Variable
    kind: DeviceKind
    workers: tuple[Worker, ...]
    devices: int


def source(environ: Mapping[str, str]) -> Variable | None:
    """Return the variable that describes the workers, valid or not; None if no variable does.

    The order is that of XRT, with one exception: `TPU_NUM_DEVICES` yields to a mesh address with a local
    worker, because a pod sets all three on every host except the first.
    """
    if config := find(environ, env.XRT_TPU_CONFIG):
        return config
    mesh = find(environ, env.XRT_MESH_SERVICE_ADDRESS)
    on_pod = mesh and find(environ, env.XRT_LOCAL_WORKER)
    if (cores := find(environ, env.TPU_NUM_DEVICES)) and not on_pod:
        return cores
    # Each of these two variables needs the other. If only one is set, it is chosen last, so that it is
    # reported as incomplete.
    mapped, workers = find(environ, env.XRT_DEVICE_MAP), find(environ, env.XRT_WORKERS)
    if mapped and workers:
        return mapped
    return mesh or mapped or workers


def read_configuration(environ: Mapping[str, str]) -> Configuration | None:
    """Read the configuration of this host, before it starts any process.

    ``PJRT_DEVICE`` is ignored: core chooses between runtimes.

    Returns:
        The configuration, or None if no variable describes workers.

    Raises:
        UsageError: a value is invalid, contradicts another, or is left over from another process.
    """
    chosen = source(environ)
    if chosen is None:
        return None
    # This comes first, because the other checks would report a replica's leftovers as contradictions.
    _refuse_leftovers(environ)
    cluster = _cluster(chosen, environ)
    local = _local_worker(cluster, environ)
    hosts = _hosts(cluster, environ)
    _check_host(local, hosts, environ)
    return Configuration(
        source=chosen.name,
        kind=cluster.kind,
        workers=cluster.workers,
        devices_per_worker=cluster.devices,
        local_worker=local,
        hosts=hosts,
        mesh_address=_mesh_address(environ),
        mesh_connect_wait_s=mesh_connect_wait_s(environ),
        may_start_service=_may_start_service(environ),
        warnings=(*_warnings(cluster, local, environ), *env.warnings(environ)),
    )


def _refuse_leftovers(environ: Mapping[str, str]) -> None:
    for name in env.ONLY_GIVEN:
        if left := find(environ, name):
            raise left.error(
                f"{name} is set only in a replica's process, and this is not one",
                f"Unset it: it is left over from a replica, and {env.XRT_SHARD_ORDINAL} may be too.",
            )
    if detached := find(environ, env.XRT_HOST_ORDINAL):
        raise detached.error(
            "hosts whose TPUs are not linked cannot run one job",
            f"Unset it. List the workers of a pod in {env.XRT_TPU_CONFIG}, separated by '|'.",
        )


def _cluster(chosen: Variable, environ: Mapping[str, str]) -> _Cluster:
    match chosen.name:
        case env.XRT_TPU_CONFIG:
            return _Cluster(chosen, "TPU", read_workers(chosen), _cores(environ))
        case env.TPU_NUM_DEVICES:
            return _Cluster(chosen, "TPU", (Worker(LOCAL_SERVICE, 0, "localhost", 0),), _cores(environ))
        case env.XRT_MESH_SERVICE_ADDRESS:
            return _Cluster(chosen, "TPU", (), _cores(environ))
        case _:
            return _mapped(chosen, environ)


def _mapped(chosen: Variable, environ: Mapping[str, str]) -> _Cluster:
    workers = find(environ, env.XRT_WORKERS)
    if chosen.name == env.XRT_WORKERS or workers is None:
        missing = env.XRT_WORKERS if chosen.name == env.XRT_DEVICE_MAP else env.XRT_DEVICE_MAP
        raise chosen.error(
            f"{chosen.name} needs {missing}, which is not set",
            f"Set both, or set {env.XRT_TPU_CONFIG}='tpu_worker;0;HOST:8470' instead of both.",
        )
    served = read_workers(workers)
    mapped = read_map(chosen, served)
    return _Cluster(chosen, mapped.kind, served, mapped.devices_per_worker)


def _cores(environ: Mapping[str, str]) -> int:
    cores = find(environ, env.TPU_NUM_DEVICES)
    return read_count(cores, "the number of cores of a worker, such as 8") if cores else DEFAULT_CORES


def _local_worker(cluster: _Cluster, environ: Mapping[str, str]) -> WorkerId:
    local = find(environ, env.XRT_LOCAL_WORKER)
    known = [worker.id for worker in cluster.workers]
    if local is None and known:
        return known[0]
    # Without a list of workers, there is no first worker that this host could drive by default.
    if local is None:
        raise cluster.source.error(
            "it names the mesh service, but no variable says which worker this host drives",
            f"Set {env.XRT_LOCAL_WORKER}=name:task, and {env.XRT_TPU_CONFIG} on the host of task 0.",
        )
    asked = read_worker_id(local)
    if known and asked not in known:
        raise local.error(
            f"{asked} is not among the workers {', '.join(map(str, known))} of {cluster.source.name}",
            f"Write one of them, or unset it to use {known[0]}; it may be left over from an earlier run.",
        )
    # The other hosts get the list from the mesh service, which gets it from this host.
    if not known and asked.task == 0:
        raise local.error(
            "this host drives worker 0 and must give the other hosts the list of workers, but has none",
            f"On this host, set {env.XRT_TPU_CONFIG} to the list of all workers.",
        )
    return asked


def _hosts(cluster: _Cluster, environ: Mapping[str, str]) -> int:
    """Read the number of hosts; each drives one worker."""
    variable = find(environ, env.XRT_SHARD_WORLD_SIZE)
    workers = len(cluster.workers)
    if variable is None:
        return workers or 1
    hosts = read_count(variable, "the number of hosts")
    if workers and hosts != workers:
        # In a replica's environment, the same variable is the number of replicas.
        replicas = hosts == workers * cluster.devices
        hint = " (the number of replicas: is it left over from a replica?)" if replicas else ""
        raise variable.error(
            f"{hosts} hosts{hint}, but {cluster.source.name} lists {workers} worker(s), one per host",
            f"Write {env.XRT_SHARD_WORLD_SIZE}={workers}, or unset it.",
        )
    return hosts


def _check_host(local: WorkerId, hosts: int, environ: Mapping[str, str]) -> None:
    if local.task >= hosts:
        # With a list of workers, the checks above exclude this: only the two variables below are known.
        raise UsageError(
            f"this host drives {local}, but with {hosts} host(s) every task must be below {hosts}",
            where=f"{env.XRT_LOCAL_WORKER}={environ[env.XRT_LOCAL_WORKER].strip()}",
            fix=f"Set {env.XRT_SHARD_WORLD_SIZE} to the number of hosts, at least {local.task + 1}.",
        )
    variable = find(environ, env.XRT_SHARD_ORDINAL)
    if variable and read_count(variable, "the index of this host", least=0) != local.task:
        raise variable.error(
            f"this host drives {local}, so its index is {local.task}, not {variable.text}",
            f"Unset it: it is left over from a replica or from another host. The task in "
            f"{env.XRT_LOCAL_WORKER} is the index of this host.",
        )


def _mesh_address(environ: Mapping[str, str]) -> str | None:
    mesh = find(environ, env.XRT_MESH_SERVICE_ADDRESS)
    return join_address(*read_address(mesh, mesh.text)) if mesh else None


def _may_start_service(environ: Mapping[str, str]) -> bool:
    start = find(environ, env.XRT_START_LOCAL_SERVER)
    return read_flag(start) if start else True


def _warnings(cluster: _Cluster, local: WorkerId, environ: Mapping[str, str]) -> list[str]:
    chosen = cluster.source.name
    warnings = [
        f"{name} has no effect because {chosen} is set: unset one of them."
        for name in (env.XRT_DEVICE_MAP, env.XRT_WORKERS)
        if chosen != env.XRT_DEVICE_MAP and find(environ, name)
    ]
    warnings += [
        f"{name} contains {GRPC}, which is ignored: write the address without it."
        for name in (env.XRT_TPU_CONFIG, env.XRT_MESH_SERVICE_ADDRESS)
        if GRPC in environ.get(name, "")
    ]
    if len(cluster.workers) > 1 and not find(environ, env.XRT_LOCAL_WORKER):
        warnings.append(
            f"{env.XRT_LOCAL_WORKER} is not set, so this host drives {local}, "
            f"the first of {len(cluster.workers)} workers."
        )
    return warnings
