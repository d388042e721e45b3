"""The variables that this runtime reads or gives to its processes; each constant is spelt as its variable.

Functions that need a variable take a mapping.
"""

from __future__ import annotations

PJRT_DEVICE = "PJRT_DEVICE"
"""The kind of device that torch_xla opens, such as ``TPU`` or ``CPU``.
Default: unset; torch_xla then looks for attached accelerators itself.
"""

CPU_NUM_DEVICES = "CPU_NUM_DEVICES"
"""Number of replicas on the CPU of one host.
Default: 1.
"""

POLYXLA_PJRT_PROCESSES = "POLYXLA_PJRT_PROCESSES"
"""Number of processes that share the CPU replicas equally; the replicas of one process are threads.
Default: the number of replicas.
"""

PJRT_LOCAL_PROCESS_RANK = "PJRT_LOCAL_PROCESS_RANK"
"""Given: a process's number on its host, as torch_xla's own launch sets it."""

PJRT_LOCAL_PROCESS_COUNT = "PJRT_LOCAL_PROCESS_COUNT"
"""Given: number of processes on a host, as torch_xla's own launch sets it."""

XLA_THREAD_POOL_SIZE = "XLA_THREAD_POOL_SIZE"
"""Given: number of threads in torch_xla's pool.
Default: the number of cores.
"""

POLYXLA_PJRT_DEVICE = "POLYXLA_PJRT_DEVICE"
"""Given: the index of the device that a process was prepared for, as in ``devices=[index]``."""

POLYXLA_PJRT_LOCAL_DEVICE = "POLYXLA_PJRT_LOCAL_DEVICE"
"""Given: that device's number among those that the process sees."""

READ = (PJRT_DEVICE, CPU_NUM_DEVICES, POLYXLA_PJRT_PROCESSES)
"""The variables that a user may set."""
