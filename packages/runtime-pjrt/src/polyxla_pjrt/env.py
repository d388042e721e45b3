"""The variables this runtime reads or gives to its processes, each spelt as itself.

Functions that need a variable take a mapping. Only a plain torch_xla program's process is itself given
variables (`add`): nobody else could.
"""

from __future__ import annotations

PJRT_DEVICE = "PJRT_DEVICE"
"""The kind of device torch_xla opens, such as ``TPU`` or ``CPU``.
Default: unset; torch_xla then looks for attached accelerators itself.
"""

CPU_NUM_DEVICES = "CPU_NUM_DEVICES"
"""Number of replicas on the CPU of one host.
Default: 1.
"""

TPU_SKIP_MDS_QUERY = "TPU_SKIP_MDS_QUERY"
"""Set to ``1``: the slice is described by the variables below, and nobody asks the metadata server.
Default: unset. Any text counts as set for torch_xla, ``0`` and ``false`` too, so those two are refused.
"""

TPU_ACCELERATOR_TYPE = "TPU_ACCELERATOR_TYPE"
"""The slice's type, such as ``v4-16``.
Default: the metadata server's.
"""

TPU_PROCESS_BOUNDS = "TPU_PROCESS_BOUNDS"
"""How the slice's processes are arranged, ``x,y,z``. Read: one process per host. Given: one per chip.
Default: the arrangement usual for the type.
"""

TPU_HOST_BOUNDS = "TPU_HOST_BOUNDS"
"""The older name of `TPU_PROCESS_BOUNDS`, read where that one is unset."""

TPU_CHIPS_PER_PROCESS_BOUNDS = "TPU_CHIPS_PER_PROCESS_BOUNDS"
"""How one process's chips are arranged, ``x,y,z``. Read: those of a host. Given: always ``1,1,1``.
Default: the arrangement usual for the type.
"""

TPU_CHIPS_PER_HOST_BOUNDS = "TPU_CHIPS_PER_HOST_BOUNDS"
"""The older name of `TPU_CHIPS_PER_PROCESS_BOUNDS`, read where that one is unset."""

CLOUD_TPU_TASK_ID = "CLOUD_TPU_TASK_ID"
"""A process's number in the slice. Read: of this host's worker, from 0. Given: of each local process.
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

TPU_PROCESS_ADDRESSES = "TPU_PROCESS_ADDRESSES"
"""Given: ``host:port`` of every process of the slice, comma separated, in the order of their task ids."""

TPU_PROCESS_PORT = "TPU_PROCESS_PORT"
"""Given: the port one process listens on for the others, from 8476."""

TPU_VISIBLE_CHIPS = "TPU_VISIBLE_CHIPS"
"""The chips of this host to use, comma separated, from 0. Given: the one chip of a process.
Default: all of them.
"""

GCE_METADATA_HOST = "GCE_METADATA_HOST"
"""Where the metadata server is, ``host`` or ``host:port``; the name google-auth gave this variable.
Default: ``metadata.google.internal``.
"""

TPU_LIBRARY_PATH = "TPU_LIBRARY_PATH"
"""Where libtpu.so is.
Default: the installed libtpu package's.
"""

POLYXLA_EMULATE = "POLYXLA_EMULATE"
"""A TPU's type, such as ``v3-8``, to be emulated on this machine's CPU: same processes, threads and names.
Default: unset.
"""

POLYXLA_PJRT_PROCESSES = "POLYXLA_PJRT_PROCESSES"
"""How many processes share the CPU replicas equally; in a process of several each is a thread.
Default: as many as replicas.
"""

PJRT_LOCAL_PROCESS_RANK = "PJRT_LOCAL_PROCESS_RANK"
"""Given: a process's number on its host, as torch_xla's own launch sets it."""

PJRT_LOCAL_PROCESS_COUNT = "PJRT_LOCAL_PROCESS_COUNT"
"""Given: number of processes on a host, as torch_xla's own launch sets it."""

MASTER_ADDR = "MASTER_ADDR"
"""Given, but read under torchrun: where torch.distributed's store is."""

MASTER_PORT = "MASTER_PORT"
"""Given, but read under torchrun: the port of torch.distributed's store."""

WORLD_SIZE = "WORLD_SIZE"
"""Number of processes that torchrun has started.
Default: unset, which means that it has not.
"""

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""Number of processes that torchrun has started on this host."""

RANK = "RANK"
"""This process's number among those that torchrun has started."""

TORCHELASTIC_RUN_ID = "TORCHELASTIC_RUN_ID"
"""Set by torchrun in the processes it starts.
Default: unset.
"""

NPROC = "NPROC"
"""Given: how many threads XLA's own pools have.
Default: the number of cores.
"""

XLA_THREAD_POOL_SIZE = "XLA_THREAD_POOL_SIZE"
"""Given: how many threads torch_xla's pool has.
Default: the number of cores.
"""

POLYXLA_PJRT_DEVICE = "POLYXLA_PJRT_DEVICE"
"""Given: the index of the device that a process was prepared for, as in ``devices=[index]``."""

POLYXLA_PJRT_LOCAL_DEVICE = "POLYXLA_PJRT_LOCAL_DEVICE"
"""Given: that device's number among those the process sees."""

READ = (
    PJRT_DEVICE,
    CPU_NUM_DEVICES,
    POLYXLA_EMULATE,
    POLYXLA_PJRT_PROCESSES,
    TPU_SKIP_MDS_QUERY,
    TPU_ACCELERATOR_TYPE,
    TPU_PROCESS_BOUNDS,
    TPU_HOST_BOUNDS,
    TPU_CHIPS_PER_PROCESS_BOUNDS,
    TPU_CHIPS_PER_HOST_BOUNDS,
    CLOUD_TPU_TASK_ID,
    TPU_WORKER_ID,
    TPU_WORKER_HOSTNAMES,
    TPU_VISIBLE_CHIPS,
    TPU_LIBRARY_PATH,
    GCE_METADATA_HOST,
)
"""What a person may set."""
