"""TPU nodes: the variables of runtime xrt on each host, and the command that starts a worker.

The launching machine needs no runtime, so the names of runtime xrt are repeated here;
``integration/test_pods.py`` compares them. Source of the variables, the worker's name and the ports:
torch_xla 1.13, xla_dist.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyxla import UsageError

RUNTIME = "xrt"
"""The runtime's name."""
DISTRIBUTION = "polyxla-runtime-xrt"
"""What must be installed on the hosts."""
XRT_TPU_CONFIG, XRT_DEVICE_MAP, XRT_WORKERS = "XRT_TPU_CONFIG", "XRT_DEVICE_MAP", "XRT_WORKERS"
XRT_LOCAL_WORKER = "XRT_LOCAL_WORKER"
XRT_SHARD_WORLD_SIZE, XRT_SHARD_ORDINAL = "XRT_SHARD_WORLD_SIZE", "XRT_SHARD_ORDINAL"
XRT_MESH_SERVICE_ADDRESS = "XRT_MESH_SERVICE_ADDRESS"
TPU_NUM_DEVICES = "TPU_NUM_DEVICES"
TOKEN_VARIABLE = "POLYXLA_XRT_TOKEN_FILE"  # noqa: S105  (a variable's name, not a token)
"""Names the file with the token that a worker requires of its clients."""
CREDENTIALS = (TOKEN_VARIABLE, "POLYXLA_XRT_TLS_CA", "POLYXLA_XRT_TLS_CERT", "POLYXLA_XRT_TLS_KEY")
"""The variables that name a client's credentials for workers."""
WORKER_PORT = 8470
"""Default of the port of each host's worker."""
MESH_PORT = 8477
"""Port of the mesh service on host 0."""
DEFAULT_CORES = "8"
"""Number of cores of a worker if `TPU_NUM_DEVICES` is unset."""
TOKEN_FILE = "{token_file}"  # noqa: S105
"""Placeholder in a worker's command for the file with the token. The host chooses the file's name."""
READY = "worker: serving "
"""Text in the line that a worker prints once clients can connect."""

_WORKER = "c_tpu_worker"
_SHARD = (XRT_SHARD_WORLD_SIZE, XRT_SHARD_ORDINAL)
_TOGETHER = (XRT_TPU_CONFIG, XRT_DEVICE_MAP, XRT_WORKERS, XRT_LOCAL_WORKER, *_SHARD)


def variables(environ: Mapping[str, str], addresses: Sequence[str], port: int, host: int) -> dict[str, str]:
    """Return the variables by which the command on a host finds its worker and the other hosts.

    Args:
        environ: the user's variables. If they describe the workers, nothing is added.
        addresses: the hosts' addresses, in the order of their numbers.
        port: the port of each host's worker.
        host: the host's number.
    """
    if describes_workers(environ):
        return {}
    entries = (f"{_WORKER};{task};{join(address, port)}" for task, address in enumerate(addresses))
    # Set even on a single host, so that the launch checks its worker before it imports anything.
    found = {XRT_TPU_CONFIG: "|".join(entries), XRT_LOCAL_WORKER: f"{_WORKER}:{host}"}
    if len(addresses) > 1:
        found[XRT_MESH_SERVICE_ADDRESS] = join(addresses[0], MESH_PORT)
        found |= {XRT_SHARD_WORLD_SIZE: str(len(addresses)), XRT_SHARD_ORDINAL: str(host)}
    return found


def describes_workers(environ: Mapping[str, str]) -> bool:
    """Return whether the user's variables describe the workers."""
    return any(environ.get(name) for name in _TOGETHER)


def check_variables(environ: Mapping[str, str], host_count: int) -> None:
    """Check that the user's variables describe all workers, or none.

    Raises:
        UsageError: some are set and others are missing, and polyxla pod's own would contradict them.
    """
    own = [name for name in _TOGETHER if environ.get(name)]
    if not own:
        return
    # Runtime xrt accepts the two lists in place of the configuration.
    listed = XRT_DEVICE_MAP in own and XRT_WORKERS in own
    needed = [] if listed else [XRT_TPU_CONFIG]
    if host_count > 1:
        needed += [XRT_LOCAL_WORKER, XRT_MESH_SERVICE_ADDRESS]
    if missing := [name for name in needed if not environ.get(name)]:
        raise UsageError(
            f"{', '.join(missing)} is missing: with {', '.join(own)} set, polyxla pod sets none of them",
            where=f"--env {own[0]}={environ[own[0]]}",
            fix=f"Set these, too, such as --env {XRT_LOCAL_WORKER}={_WORKER}:{{host}}; or unset all, and the "
            "list of hosts describes the workers.",
        )


def check_workers(runtime: str | None, environ: Mapping[str, str]) -> None:
    """Check that workers can be started for the command.

    Raises:
        UsageError: the runtime has no workers, the user describes other ones, or their options are invalid.
    """
    if runtime != RUNTIME:
        raise UsageError(
            f"only runtime {RUNTIME} has workers, and the command uses {runtime or 'what each host chooses'}",
            where="--workers",
            fix=f"Write --runtime {RUNTIME} --workers, or omit --workers.",
        )
    # A token of the user's would not match the one that the started workers require.
    if own := [name for name in (*_TOGETHER, *CREDENTIALS) if environ.get(name)]:
        raise UsageError(
            f"the hosts' own workers are started, with a token made for this job, but {own[0]} is set",
            where="--workers",
            fix=f"Omit --env {own[0]}; or omit --workers, and start the workers yourself.",
        )
    cores = environ.get(TPU_NUM_DEVICES, DEFAULT_CORES)
    if not cores.isdecimal() or int(cores) == 0:
        raise UsageError(
            f"{cores!r} is not a number of cores",
            where=f"--env {TPU_NUM_DEVICES}={cores}",
            fix=f"Write the number of cores of each worker, such as --env {TPU_NUM_DEVICES}=4.",
        )


def worker_command(python: str, environ: Mapping[str, str], address: str) -> list[str]:
    """Return the command of a host's worker, with `TOKEN_FILE` for the file that the host makes.

    Args:
        python: the Python on the host.
        environ: the user's variables.
        address: ``host:port`` to listen on.
    """
    cores = environ.get(TPU_NUM_DEVICES, DEFAULT_CORES)
    options = ["--address", address, "--devices", cores, "--token-file", TOKEN_FILE]
    return [python, "-m", "polyxla", "worker", *options]


def join(address: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
