"""The variables this runtime reads or gives to its processes, each spelt as itself.

Nothing here touches the process's environment: every function that needs a variable takes a mapping.
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
