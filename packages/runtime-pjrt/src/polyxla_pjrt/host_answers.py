"""torch_xla's questions about its TPU host, answered by this runtime. Imports torch_xla.

torch_xla counts PCI devices, and asks the metadata server in every process. It cannot read all answers of
that server, and where variables describe the slice it takes a process's number for the host's.
"""

from __future__ import annotations

from typing import Any

from torch_xla._internal import tpu

from polyxla.plugin import EmulatedTpu, TpuSlice, attached_chips, join, snapshot
from polyxla_pjrt.cores import this_slice

_original = (tpu.num_available_chips, tpu.get_tpu_env, tpu.get_worker_ips)


def answer() -> None:
    """Answer torch_xla's questions from now on; on a machine without TPUs, torch_xla answers itself."""
    tpu.num_available_chips = _num_available_chips
    tpu.get_tpu_env = _get_tpu_env
    tpu.get_worker_ips = _get_worker_ips


def _num_available_chips() -> int:
    emulated = EmulatedTpu.read(snapshot())
    return len(emulated.chips) if emulated else _original[0]()


def _get_tpu_env() -> Any:
    tpu_slice = _slice()
    if tpu_slice is None:
        return _original[1]()
    return {
        "ACCELERATOR_TYPE": tpu_slice.accelerator.name,
        "TPU_PROCESS_BOUNDS": join(tpu_slice.bounds.hosts),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": join(tpu_slice.bounds.chips_per_host),
        "WORKER_ID": str(tpu_slice.worker_id),
    }


def _get_worker_ips() -> list[str]:
    tpu_slice = _slice()
    if tpu_slice is None:
        return _original[2]()
    return list(tpu_slice.hostnames) if len(tpu_slice.hostnames) > 1 else ["localhost"]


def _slice() -> TpuSlice | None:
    environ = snapshot()
    return this_slice(environ) if EmulatedTpu.read(environ) or attached_chips() else None
