"""The XRT variables that this runtime reads, and those that it sets for its processes.

Each constant equals its own name. Source of names and defaults: torch_xla 1.13, the last release line
that drove TPU nodes through XRT alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

XRT_TPU_CONFIG = "XRT_TPU_CONFIG"
"""The TPU workers: ``name;task;host:port``, separated by ``|``; tasks count from 0.
Default: unset; no TPU node is used.
"""

XRT_LOCAL_WORKER = "XRT_LOCAL_WORKER"
"""The worker whose cores this host drives, ``name:task``; ``name`` alone means task 0. Also set for replicas.
Default: the first worker of `XRT_TPU_CONFIG`.
"""

TF_CPP_MIN_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
"""Given in the processes of a worker, unless set there: ``1``, which omits jaxlib's reports of success."""

TPU_NUM_DEVICES = "TPU_NUM_DEVICES"
"""Number of cores of each worker. Alone, it means a worker on this host, driven by one process.
Default: 8.
"""

XRT_DEVICE_MAP = "XRT_DEVICE_MAP"
"""An explicit device table: ``KIND:n;/job:NAME/replica:0/task:TASK/device:TYPE:i``, separated by ``|``.
Default: unset. It needs `XRT_WORKERS`.
"""

XRT_WORKERS = "XRT_WORKERS"
"""The addresses of the workers that `XRT_DEVICE_MAP` names: ``name:task;host:port``, separated by ``|``.
Default: unset.
"""

XRT_MESH_SERVICE_ADDRESS = "XRT_MESH_SERVICE_ADDRESS"
"""The address of the mesh service, ``host:port`` on the host of worker 0. Also set for replicas.
Default: the launcher chooses one on a single host; several hosts must set it.
"""

XRT_MESH_CONNECT_WAIT = "XRT_MESH_CONNECT_WAIT"
"""Longest wait for the mesh service to answer for the first time, in seconds.
Default: 300.
"""

XRT_START_LOCAL_SERVER = "XRT_START_LOCAL_SERVER"
"""Whether polyxla may start a worker named ``localservice`` on this host: ``1``, ``0``, ``true``, ``false``.
Default: 1.
"""

XRT_SHARD_WORLD_SIZE = "XRT_SHARD_WORLD_SIZE"
"""Read from the user: the number of hosts. Set for replicas: the number of replicas.
Default: the number of workers.
"""

XRT_SHARD_ORDINAL = "XRT_SHARD_ORDINAL"
"""Read from the user: the index of this host, which is its worker's task. Set for replicas: the ordinal.
Default: unset.
"""

XRT_SHARD_LOCAL_ORDINAL = "XRT_SHARD_LOCAL_ORDINAL"
"""Set for replicas: the local ordinal."""

XRT_HOST_WORLD_SIZE = "XRT_HOST_WORLD_SIZE"
"""Set for replicas: the number of hosts."""

XRT_MULTI_PROCESSING_DEVICE = "XRT_MULTI_PROCESSING_DEVICE"
"""Set for replicas: the core that the process drives, such as ``TPU:3``."""

XRT_HOST_ORDINAL = "XRT_HOST_ORDINAL"
"""Refused: it numbered hosts whose TPUs are not linked, which this runtime does not support.
Default: unset.
"""

POLYXLA_XRT_TOKEN_FILE = "POLYXLA_XRT_TOKEN_FILE"  # noqa: S105  (a variable's name, not a token)
"""File with the worker's token, the same token as in ``polyxla worker --token-file``.
Default: none.
"""

POLYXLA_XRT_TLS_CA = "POLYXLA_XRT_TLS_CA"
"""File with the certificates of the authority that signed the worker's certificate, PEM. Enables TLS.
Default: none; calls are not encrypted.
"""

POLYXLA_XRT_TLS_CERT = "POLYXLA_XRT_TLS_CERT"
"""File with this client's certificate, PEM, for workers that require one.
Default: none.
"""

POLYXLA_XRT_TLS_KEY = "POLYXLA_XRT_TLS_KEY"
"""File with the key of the client's certificate, PEM.
Default: none.
"""

POLYXLA_XRT_RESUME = "POLYXLA_XRT_RESUME"
"""Longest wait for a worker after the loss of the job's, in seconds; then the job goes on there.
Default: unset; the loss of its worker ends a job.
"""

POLYXLA_XRT_SPARES = "POLYXLA_XRT_SPARES"
"""The addresses of workers that may take a job whose worker is lost: ``host:port``, separated by commas.
Default: none; the job waits for its worker to come back.
"""

POLYXLA_XRT_SNAPSHOT_EVERY = "POLYXLA_XRT_SNAPSHOT_EVERY"
"""Number of programs after which a process that can resume copies its arrays to the host. Of a job of several
processes, those in which they meet are counted.
Default: 100.
"""

POLYXLA_XRT_JOB = "POLYXLA_XRT_JOB"
"""The name of the job, under which a later one of the same user finds what this one keeps on the worker.
Default: unset; the job keeps nothing.
"""

POLYXLA_XRT_ASSIGNMENT = "POLYXLA_XRT_ASSIGNMENT"
"""Set for replicas: the worker, the job and the cores of the process, as JSON."""

PJRT_DEVICE = "PJRT_DEVICE"
"""Set for replicas: torch_xla's choice of a device, here `NODE`."""

NODE = "TPU_XRT"
"""The value of `PJRT_DEVICE` for this runtime. torch_xla's Python reads the part before the underscore."""

XLA_THREAD_POOL_SIZE = "XLA_THREAD_POOL_SIZE"
"""Set for replicas: the number of threads in torch_xla's pool."""

MASTER_ADDR = "MASTER_ADDR"
"""Set for replicas: the host of torch.distributed's store."""

MASTER_PORT = "MASTER_PORT"
"""Set for replicas: the port of torch.distributed's store."""

TPU_SKIP_MDS_QUERY = "TPU_SKIP_MDS_QUERY"
"""Set for replicas: stops torch_xla from querying Google's metadata server for an attached TPU."""

TPU_ACCELERATOR_TYPE = "TPU_ACCELERATOR_TYPE"
"""Set for replicas: the accelerator type that torch_xla sees."""

TPU_PROCESS_BOUNDS = "TPU_PROCESS_BOUNDS"
"""Set for replicas, to match the accelerator type."""

TPU_CHIPS_PER_PROCESS_BOUNDS = "TPU_CHIPS_PER_PROCESS_BOUNDS"
"""Set for replicas, to match the accelerator type."""

TPU_WORKER_ID = "TPU_WORKER_ID"
"""Set for replicas: the index of this host."""

TPU_WORKER_HOSTNAMES = "TPU_WORKER_HOSTNAMES"
"""Set for replicas, to match the accelerator type."""

CLIENT = (POLYXLA_XRT_TOKEN_FILE, POLYXLA_XRT_TLS_CA, POLYXLA_XRT_TLS_CERT, POLYXLA_XRT_TLS_KEY)
"""The variables that name a client's credentials for workers."""

CHOOSING = (XRT_TPU_CONFIG, XRT_DEVICE_MAP, XRT_WORKERS)
"""The variables that ``polyxla env`` always prints."""

READ = (
    *CHOOSING,
    XRT_LOCAL_WORKER,
    TPU_NUM_DEVICES,
    XRT_MESH_SERVICE_ADDRESS,
    XRT_MESH_CONNECT_WAIT,
    XRT_START_LOCAL_SERVER,
    XRT_SHARD_WORLD_SIZE,
    XRT_SHARD_ORDINAL,
)
"""The XRT variables that a user or a pod's launcher may set."""

ONLY_GIVEN = (XRT_MULTI_PROCESSING_DEVICE, XRT_SHARD_LOCAL_ORDINAL, XRT_HOST_WORLD_SIZE)
"""Variables that only a replica's process has: set anywhere else, they are left over from a replica."""

_DETACHED = "it is for hosts whose TPUs are not linked, which this runtime does not support"
_SESSIONS = "it tuned TensorFlow sessions, which this runtime does not use"

WITHOUT_EFFECT = {
    "XRT_TORCH_DIST_ROOT": _DETACHED,
    "XRT_TORCH_DIST_METHOD": _DETACHED,
    "XRT_MESH_MAX_MSGSIZE": "the mesh service has a fixed limit",
    "XRT_GRPC_COMPRESSION": _SESSIONS,
    "XRT_GRPC_COMPRESSION_LEVEL": _SESSIONS,
    "XRT_GRPC_MULTISTREAM": _SESSIONS,
    "XRT_MAX_TENSORS_PARTITION": _SESSIONS,
    "XRT_SPLIT_CHAINED_EXEC": _SESSIONS,
}
"""The XRT variables that are known and ignored, and why."""

KNOWN = frozenset({*READ, *ONLY_GIVEN, XRT_HOST_ORDINAL, *WITHOUT_EFFECT})
"""Every valid XRT variable; other names that begin with ``XRT_`` are probably misspelt."""


def warnings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning for each variable beginning with ``XRT_`` that has no effect: ignored or unknown."""
    names = sorted(name for name in environ if name.upper().startswith("XRT_"))
    return tuple(
        f"{name} has no effect: {WITHOUT_EFFECT[name]}." if name in WITHOUT_EFFECT else _unknown(name)
        for name in names
        if name in WITHOUT_EFFECT or name not in KNOWN
    )


def misspelt(environ: Mapping[str, str]) -> dict[str, str]:
    """Return each unknown variable that resembles an XRT variable, with that one's name.

    Other unknown names that begin with ``XRT_`` may be another program's: AMD's XRT library has some, too.
    """
    return {name: near for name in sorted(environ) if _is_unknown(name) and (near := _nearest(name))}


def _is_unknown(name: str) -> bool:
    return name.upper().startswith("XRT_") and name not in KNOWN


def _nearest(name: str) -> str | None:
    return next(iter(difflib.get_close_matches(name.upper(), sorted(KNOWN), n=1, cutoff=0.75)), None)


def _unknown(name: str) -> str:
    near = _nearest(name)
    return f"{name} is not an XRT variable and has no effect." + (f" Did you mean {near}?" if near else "")
