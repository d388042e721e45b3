"""Prints what torch_xla finds behind its own TPU plugin, and a sum over all replicas."""

import torch
import torch_xla
from torch_xla import runtime
from torch_xla_helpers import everywhere, xm


def sum_of_all() -> tuple[int, list[float]]:
    """Return this replica's ordinal, and the sum of all ordinals."""
    ordinal = runtime.global_ordinal()
    total = xm.all_reduce(xm.REDUCE_SUM, torch.full((2,), float(ordinal), device=torch_xla.device()))
    torch_xla.sync()
    return ordinal, total.tolist()


found = everywhere(sum_of_all)
attributes = runtime.global_runtime_device_attributes()
print(runtime.device_type(), runtime.process_index(), runtime.global_runtime_device_count())
print([(device["name"], device["coords"], device["core_on_chip"]) for device in attributes])
print(found)
print(xm.get_memory_info("xla:0")["bytes_limit"] >> 30)
