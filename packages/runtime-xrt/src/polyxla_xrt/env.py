"""The XRT variables that this runtime reads or gives to its processes, each spelt as itself.

Functions that need a variable take a mapping. Source of names and defaults: torch_xla 1.13, the last
release line whose TPU nodes were driven through XRT alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

XRT_TPU_CONFIG = "XRT_TPU_CONFIG"
"""The TPU workers: ``name;task;host:port``, several joined by ``|``, the tasks counting from 0.
Default: unset, which asks for no TPU node.
"""

XRT_LOCAL_WORKER = "XRT_LOCAL_WORKER"
"""The worker whose cores this host drives, ``name:task``; ``name`` alone is its task 0. Given as well.
Default: the first of `XRT_TPU_CONFIG`.
"""

TPU_NUM_DEVICES = "TPU_NUM_DEVICES"
"""Number of cores of each worker. Alone, it asks for a service on this host, for one process.
Default: 8.
"""

XRT_DEVICE_MAP = "XRT_DEVICE_MAP"
"""An explicit table of devices, ``KIND:n;/job:NAME/replica:0/task:TASK/device:TYPE:i`` joined by ``|``.
Default: unset. It is complete only together with `XRT_WORKERS`.
"""

XRT_WORKERS = "XRT_WORKERS"
"""The addresses of the workers that `XRT_DEVICE_MAP` names: ``name:task;host:port``, joined by ``|``.
Default: unset.
"""

XRT_MESH_SERVICE_ADDRESS = "XRT_MESH_SERVICE_ADDRESS"
"""Where the processes of a job meet, ``host:port`` on the host of worker 0. Given as well.
Default: chosen by the launcher on one host; several hosts need it.
"""

XRT_MESH_CONNECT_WAIT = "XRT_MESH_CONNECT_WAIT"
"""Longest wait for the mesh service to answer for the first time, in seconds.
Default: 300.
"""

XRT_START_LOCAL_SERVER = "XRT_START_LOCAL_SERVER"
"""Whether a worker called ``localservice`` may be started on this host: ``1``, ``0``, ``true``, ``false``.
Default: 1.
"""

XRT_SHARD_WORLD_SIZE = "XRT_SHARD_WORLD_SIZE"
"""Read: the number of hosts. Given: the number of replicas.
Default: the number of workers.
"""

XRT_SHARD_ORDINAL = "XRT_SHARD_ORDINAL"
"""Read: the number of this host, which is its worker's task. Given: a replica's ordinal.
Default: unset.
"""

XRT_SHARD_LOCAL_ORDINAL = "XRT_SHARD_LOCAL_ORDINAL"
"""Given: a replica's number on its host."""

XRT_HOST_WORLD_SIZE = "XRT_HOST_WORLD_SIZE"
"""Given: the number of hosts."""

XRT_MULTI_PROCESSING_DEVICE = "XRT_MULTI_PROCESSING_DEVICE"
"""Given: the core that a process drives, such as ``TPU:3``."""

XRT_HOST_ORDINAL = "XRT_HOST_ORDINAL"
"""Refused: it numbered hosts whose TPUs are not linked, which this runtime cannot drive.
Default: unset.
"""

POLYXLA_XRT_TOKEN_FILE = "POLYXLA_XRT_TOKEN_FILE"  # noqa: S105  (its name, not what it holds)
"""File that holds the token which the worker wants, the same as that of ``polyxla worker --token-file``.
Default: none.
"""

POLYXLA_XRT_TLS_CA = "POLYXLA_XRT_TLS_CA"
"""File with the certificates that vouch for the worker's, PEM; calls are encrypted where it is set.
Default: none, and calls are not encrypted.
"""

POLYXLA_XRT_TLS_CERT = "POLYXLA_XRT_TLS_CERT"
"""File with this client's certificate, PEM, for workers that want one.
Default: none.
"""

POLYXLA_XRT_TLS_KEY = "POLYXLA_XRT_TLS_KEY"
"""File with that certificate's key, PEM.
Default: none.
"""

POLYXLA_XRT_PLACE = "POLYXLA_XRT_PLACE"
"""Given: the worker, the job and the cores of a process, as JSON."""

PJRT_DEVICE = "PJRT_DEVICE"
"""Given: torch_xla's choice of a device, here `NODE`."""

NODE = "TPU_XRT"
"""The value of `PJRT_DEVICE` for this runtime. torch_xla's Python reads it up to the underscore."""

XLA_THREAD_POOL_SIZE = "XLA_THREAD_POOL_SIZE"
"""Given: the number of threads of torch_xla's pool."""

MASTER_ADDR = "MASTER_ADDR"
"""Given: where torch.distributed's store is."""

MASTER_PORT = "MASTER_PORT"
"""Given: its port."""

TPU_SKIP_MDS_QUERY = "TPU_SKIP_MDS_QUERY"
"""Given: keeps torch_xla from asking Google's metadata server for a TPU that is not attached here."""

TPU_ACCELERATOR_TYPE = "TPU_ACCELERATOR_TYPE"
"""Given: what torch_xla takes the worker's cores for."""

TPU_PROCESS_BOUNDS = "TPU_PROCESS_BOUNDS"
"""Given, as the type."""

TPU_CHIPS_PER_PROCESS_BOUNDS = "TPU_CHIPS_PER_PROCESS_BOUNDS"
"""Given, as the type."""

TPU_WORKER_ID = "TPU_WORKER_ID"
"""Given: the number of this host."""

TPU_WORKER_HOSTNAMES = "TPU_WORKER_HOSTNAMES"
"""Given, as the type."""

CLIENT = (POLYXLA_XRT_TOKEN_FILE, POLYXLA_XRT_TLS_CA, POLYXLA_XRT_TLS_CERT, POLYXLA_XRT_TLS_KEY)
"""What a client shows to workers."""

CHOOSING = (XRT_TPU_CONFIG, XRT_DEVICE_MAP, XRT_WORKERS)
"""What ``polyxla env`` always shows."""

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
"""What a person, or a pod's launcher, may set."""

ONLY_GIVEN = (XRT_MULTI_PROCESSING_DEVICE, XRT_SHARD_LOCAL_ORDINAL, XRT_HOST_WORLD_SIZE)
"""What only a replica's process has: set anywhere else, it is left over from one."""

_DETACHED = "it is for hosts whose TPUs are not linked, which this runtime cannot drive"
_SESSIONS = "it tuned TensorFlow sessions, and none are used"

WITHOUT_EFFECT = {
    "XRT_TORCH_DIST_ROOT": _DETACHED,
    "XRT_TORCH_DIST_METHOD": _DETACHED,
    "XRT_MESH_MAX_MSGSIZE": "the mesh service has a limit of its own",
    "XRT_GRPC_COMPRESSION": _SESSIONS,
    "XRT_GRPC_COMPRESSION_LEVEL": _SESSIONS,
    "XRT_GRPC_MULTISTREAM": _SESSIONS,
    "XRT_MAX_TENSORS_PARTITION": _SESSIONS,
    "XRT_SPLIT_CHAINED_EXEC": _SESSIONS,
}
"""The names of XRT that are known and ignored, and why."""

KNOWN = frozenset({*READ, *ONLY_GIVEN, XRT_HOST_ORDINAL, *WITHOUT_EFFECT})
"""Every name that is not a typing error."""


def remarks(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Say which variables named like those of XRT are set for nothing: ignored, or unknown."""
    names = sorted(name for name in environ if name.upper().startswith("XRT_"))
    return tuple(
        f"{name} has no effect: {WITHOUT_EFFECT[name]}." if name in WITHOUT_EFFECT else _unknown(name)
        for name in names
        if name in WITHOUT_EFFECT or name not in KNOWN
    )


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.upper(), sorted(KNOWN), n=1, cutoff=0.75)
    return f"{name} is not a variable of XRT, and has no effect." + (
        f" Did you mean {near[0]}?" if near else ""
    )
