"""The variables of TPU hosts, of torchrun and of emulation; each constant is spelt as its variable.

Functions that need a variable take a mapping.
"""

from __future__ import annotations

TPU_SKIP_MDS_QUERY = "TPU_SKIP_MDS_QUERY"
"""Set to ``1``: the variables below describe the slice, and the metadata server is not asked.
Default: unset. torch_xla counts any text as set, even ``0`` and ``false``, so those two are refused.
"""

TPU_ACCELERATOR_TYPE = "TPU_ACCELERATOR_TYPE"
"""The slice's type, such as ``v4-16``.
Default: the metadata server's.
"""

TPU_PROCESS_BOUNDS = "TPU_PROCESS_BOUNDS"
"""The arrangement of the slice's processes, ``x,y,z``. Read: one process per host. Given: one per chip.
Default: the usual arrangement of the type.
"""

TPU_HOST_BOUNDS = "TPU_HOST_BOUNDS"
"""The older name of `TPU_PROCESS_BOUNDS`, read where that one is unset."""

TPU_CHIPS_PER_PROCESS_BOUNDS = "TPU_CHIPS_PER_PROCESS_BOUNDS"
"""The arrangement of one process's chips, ``x,y,z``. Read: the chips of a host. Given: always ``1,1,1``.
Default: the usual arrangement of the type.
"""

TPU_CHIPS_PER_HOST_BOUNDS = "TPU_CHIPS_PER_HOST_BOUNDS"
"""The older name of `TPU_CHIPS_PER_PROCESS_BOUNDS`, read where that one is unset."""

CLOUD_TPU_TASK_ID = "CLOUD_TPU_TASK_ID"
"""A process's number in the slice. Read: this host's worker id, from 0. Given: to each local process.
Default: `TPU_WORKER_ID`.
"""

TPU_WORKER_ID = "TPU_WORKER_ID"
"""This host's number among the slice's workers, from 0.
Default: 0 on a slice of one host; a larger slice needs it.
"""

TPU_WORKER_HOSTNAMES = "TPU_WORKER_HOSTNAMES"
"""The hosts of the slice, comma separated, in the order of their worker ids.
Default: ``localhost`` on a slice of one host; a larger slice needs it.
"""

MEGASCALE_NUM_SLICES = "MEGASCALE_NUM_SLICES"
"""Number of slices of a job on several (multislice). Read and given.
Default: 1.
"""

MEGASCALE_SLICE_ID = "MEGASCALE_SLICE_ID"
"""The number of this host's slice in such a job, from 0. Read and given."""

MEGASCALE_COORDINATOR_ADDRESS = "MEGASCALE_COORDINATOR_ADDRESS"
"""Where the slices of such a job meet, ``host`` or ``host:port``: slice 0's first host. Read and given."""

MEGASCALE_PORT = "MEGASCALE_PORT"
"""Given: the port on which a process of such a job hears from other slices, different for each of a host."""

MEGASCALE_DEBUG_PORT = "MEGASCALE_DEBUG_PORT"
"""Given: the port after `MEGASCALE_PORT`."""

SKIP_MEGASCALE_PJRT_CLIENT = "SKIP_MEGASCALE_PJRT_CLIENT"
"""Given to a process that uses a single core, so that libtpu does not wait for other slices: ``true``."""

TPU_PROCESS_ADDRESSES = "TPU_PROCESS_ADDRESSES"
"""Given: ``host:port`` of every process of the slice, comma separated, in the order of their task ids."""

TPU_PROCESS_PORT = "TPU_PROCESS_PORT"
"""Given: the port one process listens on for the others, from 8476."""

TPU_VISIBLE_CHIPS = "TPU_VISIBLE_CHIPS"
"""The chips of this host to use, comma separated, from 0. Given: the only chip of a process.
Default: all of them, or as many as the bounds contain.
"""

TPU_VISIBLE_DEVICES = "TPU_VISIBLE_DEVICES"
"""The older name of `TPU_VISIBLE_CHIPS`, read where that one is unset."""

GCE_METADATA_HOST = "GCE_METADATA_HOST"
"""The address of the metadata server, ``host`` or ``host:port``; google-auth reads the same variable.
Default: ``metadata.google.internal``.
"""

TPU_LIBRARY_PATH = "TPU_LIBRARY_PATH"
"""The path of libtpu.so.
Default: the one in the installed libtpu package.
"""

POLYXLA_EMULATE = "POLYXLA_EMULATE"
"""The type of a TPU, such as ``v3-8``, to emulate on this machine's CPU: same processes, threads and names;
``2xv4-8`` is a job's two slices of a type.
Default: unset.
"""

POLYXLA_EMULATE_HOST = "POLYXLA_EMULATE_HOST"
"""The number of the only host of the TPU that this launch emulates, from 0; other launches emulate the other
hosts. Hosts count through the slices.
Default: unset; one launch emulates all hosts.
"""

POLYXLA_MONITOR_PORT = "POLYXLA_MONITOR_PORT"
"""The port on which the launch on host 0 of a slice listens for those on the other hosts, so that a host that
fails ends all.
Default: 8490.
"""

DEFAULT_MONITOR_PORT = 8490
"""Next to libtpu's, which has 8476 to 8483 on a host of eight chips."""

POLYXLA_MONITOR = "POLYXLA_MONITOR"
"""Given: ``host:port`` where the replica processes of a host report to their launch."""

MASTER_ADDR = "MASTER_ADDR"
"""Given, but read under torchrun: the host of torch.distributed's store."""

MASTER_PORT = "MASTER_PORT"
"""Given, but read under torchrun: the port of torch.distributed's store."""

WORLD_SIZE = "WORLD_SIZE"
"""Number of processes that torchrun has started.
Default: unset; torchrun has started none.
"""

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""Number of processes that torchrun has started on this host."""

RANK = "RANK"
"""This process's number among those that torchrun has started."""

LOCAL_RANK = "LOCAL_RANK"
"""This process's number among those that torchrun has started on this host."""

TORCHELASTIC_RUN_ID = "TORCHELASTIC_RUN_ID"
"""Set by torchrun in the processes it starts.
Default: unset.
"""

NPROC = "NPROC"
"""Given: number of threads in each of XLA's own pools.
Default: the number of cores.
"""

READ = (
    POLYXLA_EMULATE,
    POLYXLA_EMULATE_HOST,
    POLYXLA_MONITOR_PORT,
    TPU_SKIP_MDS_QUERY,
    TPU_ACCELERATOR_TYPE,
    TPU_PROCESS_BOUNDS,
    TPU_HOST_BOUNDS,
    TPU_CHIPS_PER_PROCESS_BOUNDS,
    TPU_CHIPS_PER_HOST_BOUNDS,
    CLOUD_TPU_TASK_ID,
    TPU_WORKER_ID,
    TPU_WORKER_HOSTNAMES,
    MEGASCALE_NUM_SLICES,
    MEGASCALE_SLICE_ID,
    MEGASCALE_COORDINATOR_ADDRESS,
    TPU_VISIBLE_CHIPS,
    TPU_VISIBLE_DEVICES,
    TPU_LIBRARY_PATH,
    GCE_METADATA_HOST,
)
"""The variables that a user may set."""
