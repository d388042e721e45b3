"""The variables of TorchTPU's launches; each constant is spelt as its variable.

Source: ``torch_tpu._internal.distributed.distributed`` of torch_tpu 0.2.0, and the names in its libraries.
"""

from __future__ import annotations

TORCH_TPU_TOPOLOGY = "TORCH_TPU_TOPOLOGY"
"""The arrangement of a job's chips, ``x,y,z``.
Default: that of the chips of this host, or of the emulated TPU.
"""

TORCH_TPU_SLICEBUILDER_ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
"""``host:port`` of every process of a job, comma separated, in the order of their ranks.
Default: free ports of this host; on several hosts, `TORCH_TPU_BASE_PORT` and those that follow.
"""

TORCH_TPU_BASE_PORT = "TORCH_TPU_BASE_PORT"
"""The port of the first process of each host of a slice.
Default: 8070.
"""

TORCH_TPU_XPROF_SESSION_ID = "TORCH_TPU_XPROF_SESSION_ID"
"""Given: the name that the profiles of a job's processes share."""

TORCH_TPU_DEVICES_PER_HOST = "TORCH_TPU_DEVICES_PER_HOST"
"""Never given, so that replicas meet in the job's store. With it, torch_tpu 0.2.0 lets the processes of a
host meet in ``/dev/shm/torch_tpu_pg_store_N``, where N is their parent's process id, and leaves that file."""

TORCH_TPU_INTERNAL_HANDSHAKE_PORT = "TORCH_TPU_INTERNAL_HANDSHAKE_PORT"
"""Given on an emulated TPU: the port on which the processes compare the collectives of their programs.
TorchTPU's default is one port for all jobs of a machine."""

NNODES = "NNODES"
"""Given: number of hosts of a job."""

NODE_RANK = "NODE_RANK"
"""Given: this host's number among them."""

TORCH_DEVICE_BACKEND_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Given: ``0`` in replica processes, in which this runtime loads TorchTPU itself; read by torch."""

TF_CPP_MIN_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
"""Given on an emulated TPU: ``2``, which leaves out TorchTPU's reports of success, and its warning that
replicas do not meet in shared memory. Read by XLA."""

READ = (TORCH_TPU_TOPOLOGY, TORCH_TPU_SLICEBUILDER_ADDRESSES, TORCH_TPU_BASE_PORT)
"""The variables that a user may set."""
